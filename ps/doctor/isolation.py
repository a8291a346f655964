"""Runs checks side by side, each in a forked process: a crash or a hang is a finding like any other.

What is broken on a machine tends to break whoever looks: a library dies of an illegal instruction, a
driver or a name server never answers, often within a call that no Python thread could be freed from. So
it is a process that looks, and it is killed when its time is over.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
import traceback
from collections.abc import Sequence

import msgspec

from ps.doctor.check import Check
from ps.doctor.finding import Finding, failure
from ps.errors import ConfigError
from ps.shard_command import ending

LAST_SECONDS = 1.0
"""How long a process that was killed may take to end; one that hangs in the kernel is left to it."""

MORE = 6
"""Times the seconds, for a machine that is slow: a first import of torch over a network is."""

_CHUNK = 1 << 16


def examine(checks: Sequence[Check], seconds: float) -> list[Finding]:
    """All that the checks find, in their order. Whoever calls has one thread, as it forks.

    Args:
        checks: What to run.
        seconds: After which a check that has not ended is a failure.

    Raises:
        ConfigError: The system lets this process start no others.
    """
    runs: list[_Run] = []
    deadline = time.monotonic() + seconds
    try:
        for check in checks:
            runs.append(_start(check, seconds))
        _listen(runs, deadline)
    finally:
        for run in runs:
            run.stop()
        _listen(runs, time.monotonic() + LAST_SECONDS)
        for run in runs:
            run.close()
    return [finding for run in runs for finding in run.findings(seconds)]


def _start(check: Check, seconds: float) -> _Run:
    try:
        return _Run(check, seconds)
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

    def __init__(self, check: Check, seconds: float) -> None:
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
            _look(check, seconds, answer, noise)
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

    def close(self) -> None:
        """Gives everything back."""
        if self.ended:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._said = self._last_words()
        os.close(self.answer)
        os.close(self._noise)

    def findings(self, seconds: float) -> list[Finding]:
        """What it told, and how it ended if that was not well."""
        lines = self._told.splitlines(keepends=True)
        told = [msgspec.json.decode(line, type=Finding) for line in lines if line.endswith(b"\n")]
        name, mend = self._check.name, self._check.mend
        if self._code is None or (self._killed and self._code == -signal.SIGKILL):
            mend += f"; or, where this machine is slow: ps-server doctor --timeout {MORE * seconds:g}"
            return [*told, failure(name, f"no answer within {seconds:g} s{self._said}", mend)]
        if self._code != 0:
            return [*told, failure(name, f"the check {ending(self._code)}{self._said}", mend)]
        return told

    def _last_words(self) -> str:
        """The last line that it, or a library in it, wrote for people."""
        try:
            said = os.read(self._noise, _CHUNK).decode(errors="replace").strip()
        except BlockingIOError:
            return ""
        return f"; it said last: {said.splitlines()[-1]}" if said else ""


def _look(check: Check, seconds: float, answer: int, noise: int) -> None:
    """What the process does; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        # Ends it, should the process that would kill it be killed first.
        signal.alarm(math.ceil(seconds + LAST_SECONDS) + 1)
        os.dup2(noise, 1)
        os.dup2(noise, 2)
        for finding in check.examine():
            os.write(answer, msgspec.json.encode(finding) + b"\n")
        code = 0
    except BaseException:
        os.write(noise, traceback.format_exc().encode())
    finally:
        os._exit(code)
