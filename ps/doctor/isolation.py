"""Runs checks in parallel, each in a forked process. A crash or a hang becomes a finding.

A broken machine can break the process that examines it: a library executes an illegal instruction, or a
driver or a name server never answers, often in a call that no Python thread can leave. A process per check
can be killed at its deadline. A check can run further checks the same way; they share the modules that it
has imported.
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
from hubring.ps.doctor.finding import Finding, failure, skipped, warning
from hubring.ps.doctor.progress import load, seconds_at_work
from hubring.ps.process.child import ending

LAST_SECONDS = 5.0
"""How long to wait for a killed process. One that hangs in the kernel is abandoned."""
WORKING_SHARE = 0.5
"""A check that was at work for more than this share of its time is slow; one that was not hangs."""
FAIR_SHARE = 0.25
"""A check that had less than this share of a check's time, because others used it up, is skipped."""

_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM)


class Check(NamedTuple):
    """Examines one part of the machine, in its own process, where it can crash or hang.

    Attributes:
        name: The name of the first finding.
        examine: Yields findings one by one, so that a later crash loses none.
        fix: What to do if the check crashes or hangs.
        further: The names of later findings. Those that the check does not reach are reported as skipped.
    """

    name: str
    examine: Callable[[], Iterable[Finding]]
    fix: str
    further: tuple[str, ...] = ()


def examine(
    checks: Sequence[Check], seconds: float, last: float = LAST_SECONDS, *, whole: float = 0.0
) -> list[Finding]:
    """Runs the checks and returns their findings in order. It forks, so the caller must have one thread only.

    Args:
        checks: The checks to run.
        seconds: A check that takes longer is a failure.
        last: Replaces LAST_SECONDS if the caller has less time.
        whole: The time limit of a check, if the caller has used up some of it; 0 if it has not.

    Raises:
        ConfigError: This process cannot start another process.
    """
    runs: list[_Run] = []
    deadline = time.monotonic() + seconds
    try:
        with _signals_blocked():
            for check in checks:
                runs.append(_start(check))
        _listen(runs, deadline)
    finally:
        for run in runs:
            run.stop()
        _listen(runs, time.monotonic() + last)
        for run in runs:
            run.close(last)
    return [finding for run in runs for finding in run.findings(whole or seconds)]


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks SIGINT and SIGTERM: a handler that raises during a fork would lose the error or the child."""
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
            f"cannot start a process for the check {check.name}: {error.strerror};"
            " raise ulimit -n and ulimit -u"
        ) from error


def _listen(runs: Sequence[_Run], deadline: float) -> None:
    """Reads findings until all runs end, or until the deadline."""
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
        answer: The pipe for findings, one JSON object per line.
        ended: Whether the check's process and all its descendants have closed the pipe's other end.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._findings = b""
        self._last_words = ""
        self._code: int | None = None
        self._killed = False
        self._at_work = 0.0
        self._began = time.monotonic()
        self._had = 0.0
        self.ended = False
        self.answer, answer = os.pipe()
        self._noise, noise = os.pipe()
        # Output that does not fit into the pipe is dropped, because nothing reads it until the end.
        os.set_blocking(noise, False)
        os.set_blocking(self._noise, False)
        self._pid = os.fork()
        if self._pid == 0:
            _examine(check, answer, noise)
        os.close(answer)
        os.close(noise)

    def read(self) -> None:
        """Reads available findings; blocks until there is one."""
        chunk = os.read(self.answer, _CHUNK)
        self._findings += chunk
        self.ended = not chunk

    def stop(self) -> None:
        """Kills the check's process and all its descendants, if any still runs."""
        if self.ended:
            return
        self._killed = True
        self._had = time.monotonic() - self._began
        self._at_work = seconds_at_work(self._pid)
        with contextlib.suppress(ProcessLookupError):  # the process may not have created its group yet
            os.killpg(self._pid, signal.SIGKILL)
        os.kill(self._pid, signal.SIGKILL)

    def close(self, last: float) -> None:
        """Waits at most `last` seconds for the exit code, and closes the pipes."""
        deadline = time.monotonic() + last
        while self.ended and self._code is None and time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
        with contextlib.suppress(BlockingIOError):  # no output, and a descendant still holds the pipe
            self._last_words = os.read(self._noise, _CHUNK).decode(errors="replace").strip()
        os.close(self.answer)
        os.close(self._noise)

    def findings(self, seconds: float) -> list[Finding]:
        """Returns the check's findings; after a crash or a timeout, also a failure and what was skipped.

        A check that was still at work gets a warning. One that had hardly any of its `seconds` is skipped.
        """
        lines = self._findings.splitlines(keepends=True)
        found = [msgspec.json.decode(line, type=Finding) for line in lines if line.endswith(b"\n")]
        if self._code == 0:
            return found
        name, fix = self._check.name, self._check.fix
        if self._code is None or (self._killed and self._code == -signal.SIGKILL):
            if self._had < FAIR_SHARE * seconds:
                return [*found, self._hurried(seconds), *self._left_out(found, "had no time")]
            if self._at_work > WORKING_SHARE * self._had:
                return [*found, self._slow(seconds), *self._left_out(found, "did not finish")]
            how = f"no answer within {_in_words(self._had)}"
        else:
            how = f"the check {ending(self._code)}"
        if self._last_words:
            how += f"; last output: {self._last_words.splitlines()[-1]}"
        return [*found, failure(name, how, fix), *self._left_out(found, "failed")]

    def _slow(self, seconds: float) -> Finding:
        found = f"still at work after {_in_words(self._had)}: this machine is slow or busy ({load()})"
        return warning(self._check.name, found, _longer(seconds))

    def _hurried(self, seconds: float) -> Finding:
        return skipped(
            self._check.name,
            f"only {_in_words(self._had)} of {_in_words(seconds)} were left for it: this machine is slow or"
            f" busy ({load()}); use {_longer(seconds)}",
        )

    def _left_out(self, found: Sequence[Finding], why: str) -> list[Finding]:
        known, name = {finding.name for finding in found}, self._check.name
        return [skipped(each, f"{name} {why}") for each in self._check.further if each not in known]


def _longer(seconds: float) -> str:
    return f"ps-server doctor --timeout {max(60.0, 4 * seconds):.0f}"


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 3 else f"{seconds:.1f} s"


def _examine(check: Check, answer: int, noise: int) -> None:
    """Runs the check in the forked process; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # must not outlive the parent
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.dup2(noise, 1)
        os.dup2(noise, 2)
        # Close the other checks' pipes: a reader sees the end only when every copy is closed.
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, answer, noise}:
            with contextlib.suppress(OSError):  # listdir's own descriptor is already closed
                os.close(descriptor)
        for finding in check.examine():
            os.write(answer, msgspec.json.encode(finding) + b"\n")
        code = 0
    except BaseException:
        os.write(noise, traceback.format_exc().encode())
    finally:
        os._exit(code)
