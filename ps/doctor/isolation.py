"""Runs checks side by side, each in a forked process: a crash or a hang is a finding like any other.

What is broken on a machine breaks the process that examines it: a library dies of an illegal instruction, a
driver or a name server never answers, often in a call that no Python thread can leave. So a process
examines, and is killed when its time is over. It may run further checks in the same way: they need not
load again what it has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor.finding import Finding, failure, skipped
from hubring.ps.process.child import ending

LAST_SECONDS = 5.0
"""How long a killed process may take to end; one that hangs in the kernel is left to it."""

_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM)


class Check(NamedTuple):
    """Examines one part of the machine, in a process of its own, where it may crash or hang.

    Attributes:
        name: The name of its first finding.
        examine: Yields findings one by one, so that none is lost if it crashes later.
        mend: What to try if it crashes or hangs, as a command.
        further: Names of its later findings, which are reported as skipped if it does not get that far.
    """

    name: str
    examine: Callable[[], Iterable[Finding]]
    mend: str
    further: tuple[str, ...] = ()


def examine(checks: Sequence[Check], seconds: float, last: float = LAST_SECONDS) -> list[Finding]:
    """All findings of the checks, in their order. The caller has one thread, because this forks.

    Args:
        checks: What to run.
        seconds: A check that takes longer is a failure.
        last: Replaces LAST_SECONDS for a caller that has less time.

    Raises:
        ConfigError: The system lets this process start no others.
    """
    runs: list[_Run] = []
    deadline = time.monotonic() + seconds
    try:
        with _signals_held_back():
            for check in checks:
                runs.append(_start(check))
        _listen(runs, deadline)
    finally:
        for run in runs:
            run.stop()
        _listen(runs, time.monotonic() + last)
        for run in runs:
            run.close(last)
    return [finding for run in runs for finding in run.findings(seconds)]


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Delays SIGINT and SIGTERM: a handler that raised within a fork would lose the error or the child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(check: Check) -> _Run:
    try:
        return _Run(check)
    except OSError as error:
        raise ConfigError(
            f"cannot start a process to look at {check.name}: {error.strerror}; raise ulimit -n and ulimit -u"
        ) from error


def _listen(runs: Sequence[_Run], deadline: float) -> None:
    """Reads findings until all runs have ended, or until the deadline."""
    with selectors.DefaultSelector() as selector:
        for run in runs:
            if not run.ended:
                selector.register(run.answer, selectors.EVENT_READ, run)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data.read()
                if key.data.ended:
                    selector.unregister(key.fileobj)


class _Run:
    """One running check.

    Attributes:
        answer: The pipe that its findings come from, one JSON object a line.
        ended: Its process and all that it started have: none of them holds the other end of the pipe.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._findings = b""
        self._last_words = ""
        self._code: int | None = None
        self._killed = False
        self.ended = False
        self.answer, answer = os.pipe()
        self._noise, noise = os.pipe()
        # Output that does not fit into the pipe is dropped: nothing waits for it.
        os.set_blocking(noise, False)
        os.set_blocking(self._noise, False)
        self._pid = os.fork()
        if self._pid == 0:
            _look(check, answer, noise)
        os.close(answer)
        os.close(noise)

    def read(self) -> None:
        """Reads what has arrived; blocks if nothing has."""
        chunk = os.read(self.answer, _CHUNK)
        self._findings += chunk
        self.ended = not chunk

    def stop(self) -> None:
        """Kills it and all that it started, if it still runs."""
        if self.ended:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError):  # it may not have made its group yet
            os.killpg(self._pid, signal.SIGKILL)
        os.kill(self._pid, signal.SIGKILL)

    def close(self, last: float) -> None:
        """Waits for its exit code, at most `last` seconds, and closes the pipes."""
        deadline = time.monotonic() + last
        while self.ended and self._code is None and time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
        with contextlib.suppress(BlockingIOError):  # it is silent, and something that it started lives
            self._last_words = os.read(self._noise, _CHUNK).decode(errors="replace").strip()
        os.close(self.answer)
        os.close(self._noise)

    def findings(self, seconds: float) -> list[Finding]:
        """Its findings; if it did not end well, also how it ended and what it skipped."""
        lines = self._findings.splitlines(keepends=True)
        found = [msgspec.json.decode(line, type=Finding) for line in lines if line.endswith(b"\n")]
        if self._code == 0:
            return found
        name, mend = self._check.name, self._check.mend
        if self._code is None or (self._killed and self._code == -signal.SIGKILL):
            how = f"no answer within {seconds:.3g} s"
            mend += "; or, where this machine is only slow, ps-server doctor with a longer --timeout"
        else:
            how = f"the check {ending(self._code)}"
        if self._last_words:
            how += f"; it said last: {self._last_words.splitlines()[-1]}"
        known = {finding.name for finding in found}
        left_out = [skipped(each, f"{name} failed") for each in self._check.further if each not in known]
        return [*found, failure(name, how, mend), *left_out]


def _look(check: Check, answer: int, noise: int) -> None:
    """What the process does; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it must not outlive its parent
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.dup2(noise, 1)
        os.dup2(noise, 2)
        # A pipe would never end if a process that does not use it held it.
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, answer, noise}:
            with contextlib.suppress(OSError):  # listing them took one
                os.close(descriptor)
        for finding in check.examine():
            os.write(answer, msgspec.json.encode(finding) + b"\n")
        code = 0
    except BaseException:
        os.write(noise, traceback.format_exc().encode())
    finally:
        os._exit(code)
