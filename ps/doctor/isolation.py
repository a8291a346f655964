"""Runs checks side by side, each in a forked process: a crash or a hang is a finding like any other.

What is broken on a machine tends to break whoever looks: a library dies of an illegal instruction, a
driver or a name server never answers, often within a call that no Python thread could be freed from. So
it is a process that looks, and it is killed when its time is over. It may run further checks in the same
way: what it has loaded, they need not load again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import time
import traceback
from collections.abc import Iterator, Sequence

import msgspec

from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor.check import Check
from hubring.ps.doctor.finding import Finding, failure, skipped
from hubring.ps.shard.spawn import ending

LAST_SECONDS = 5.0
"""How long a process that was killed may take to end; one that hangs in the kernel is left to it."""

_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM)


def examine(checks: Sequence[Check], seconds: float, last: float = LAST_SECONDS) -> list[Finding]:
    """All that the checks find, in their order. Whoever calls has one thread, as it forks.

    Args:
        checks: What to run.
        seconds: After which a check that has not ended is a failure.
        last: As LAST_SECONDS, for who has less.

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
    """Lets SIGINT and SIGTERM wait: what a handler raises amid a fork is lost, or a child is."""
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
    """Takes in what is told until all have ended, or until the deadline."""
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
    """One check under way.

    Attributes:
        answer: Where its findings come out, one JSON object a line.
        ended: Its process has, with all that it started: nobody holds the other end any more.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._told = b""
        self._said = ""
        self._code: int | None = None
        self._killed = False
        self.ended = False
        self.answer, answer = os.pipe()
        self._noise, noise = os.pipe()
        # What is beyond the pipe's room is lost rather than waited for.
        os.set_blocking(noise, False)
        os.set_blocking(self._noise, False)
        self._pid = os.fork()
        if self._pid == 0:
            _look(check, answer, noise)
        os.close(answer)
        os.close(noise)

    def read(self) -> None:
        """Takes in what there is; blocks if that is nothing."""
        chunk = os.read(self.answer, _CHUNK)
        self._told += chunk
        self.ended = not chunk

    def stop(self) -> None:
        """Kills it and all that it started, if it still runs."""
        if self.ended:
            return
        self._killed = True
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not come to make its group
            os.kill(self._pid, signal.SIGKILL)

    def close(self, last: float) -> None:
        """Gives everything back."""
        deadline = time.monotonic() + last
        while self.ended and self._code is None and time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
        self._said = self._last_words()
        os.close(self.answer)
        os.close(self._noise)

    def findings(self, seconds: float) -> list[Finding]:
        """What it told; if it did not end well, how it ended and what it did not come to."""
        lines = self._told.splitlines(keepends=True)
        told = [msgspec.json.decode(line, type=Finding) for line in lines if line.endswith(b"\n")]
        if self._code == 0:
            return told
        name, mend, known = self._check.name, self._check.mend, {finding.name for finding in told}
        how = f"the check {ending(self._code)}" if self._code else ""
        if self._code is None or (self._killed and self._code == -signal.SIGKILL):
            how = f"no answer within {seconds:.3g} s"
            mend += "; or, where this machine is only slow, ps-server doctor with a longer --timeout"
        left_out = [skipped(each, f"{name} failed") for each in self._check.further if each not in known]
        return [*told, failure(name, how + self._said, mend), *left_out]

    def _last_words(self) -> str:
        """The last line that it, or a library in it, wrote for people."""
        try:
            said = os.read(self._noise, _CHUNK).decode(errors="replace").strip()
        except BlockingIOError:
            return ""
        return f"; it said last: {said.splitlines()[-1]}" if said else ""


def _look(check: Check, answer: int, noise: int) -> None:
    """What the process does; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it is not to outlive who waits for it
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.dup2(noise, 1)
        os.dup2(noise, 2)
        _close_others({answer, noise})
        for finding in check.examine():
            os.write(answer, msgspec.json.encode(finding) + b"\n")
        code = 0
    except BaseException:
        os.write(noise, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _close_others(kept: set[int]) -> None:
    """Closes what came from the parent: a pipe must not stay open for those who do not use it."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # the listing itself had one
                os.close(descriptor)
