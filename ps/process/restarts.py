"""When a program or a job that ended is started again, and a program that starts itself again.

Law: what ended because something was lost starts again: it exited with 69 or 75, or a signal killed it.
What would end in the same way again does not, such as a script that failed or a setting that is wrong.
Restarts without progress are limited, and each waits longer than the one before.

Law: with `ps-server start --restarts N` or `ps-worker --restarts N`, the process that a person starts
begins each run, usually a child, and another one after a loss. A wrong setting ends the first run for
good. After a restart it may mean that what the lost process held is not free yet, such as its rank, so it
counts as a loss then.

Law: a host with standbys keeps as many shards and standbys as it began with. A standby starts at once in the
place of a process that ended, unless processes end young one after another: the next one may end for the
same reason, so each pause is twice as long as the one before.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hubring.ps.core.errors import ConfigError, Preempted, ServerUnreachable
from hubring.ps.process.child import Child, passing_on
from hubring.ps.process.launch import PARENT_VARIABLE, STOP_SIGNALS, module_command

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
"""The first restart waits the first, and each one without progress twice as long, up to the last."""
_LOOK_SECONDS = 0.1

LOST = ServerUnreachable.exit_code
_KILLS = (
    *(signal.SIGKILL, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV),
)
"""Signals of the kernel, of a scheduler and of crashes; Ctrl-C and a reader that ended are wishes."""
RESTARTABLE = frozenset({LOST, Preempted.exit_code, *(128 + number for number in _KILLS)})
"""Exit codes that a restart can help."""


def restart_helps(code: int) -> bool:
    """Returns whether a restart can help what ended with this exit code; 128+n after signal n."""
    return code in RESTARTABLE


def wait_to_restart(seconds: float, signals: Sequence[int]) -> int:
    """Waits before a restart, at most until a signal comes.

    Args:
        seconds: How long.
        signals: Signals that a handler adds.

    Returns:
        The exit code if the first signal ended the wait; 0 if none did.
    """
    deadline = time.monotonic() + seconds
    while not signals and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(_LOOK_SECONDS, left))
    if not signals:
        return 0
    return 128 + signal.SIGINT if signals[0] == signal.SIGINT else Preempted.exit_code


def restart_pause(failures: int, first: float = FIRST_PAUSE_SECONDS) -> float:
    """Returns the seconds to wait after this many failures in a row; at least one."""
    return min(first * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_SECONDS)


class Restarts:
    """Counts the restarts of one job or program.

    Args:
        most: How many restarts without progress are allowed.
        first_pause: Seconds before the first of them.

    Attributes:
        total: All restarts so far.
    """

    def __init__(self, most: int, first_pause: float = FIRST_PAUSE_SECONDS) -> None:
        self.total = 0
        self._first_pause = first_pause
        self._most = most
        self._in_a_row = 0

    @property
    def left(self) -> int:
        """How many restarts are left if there is no progress."""
        return self._most - self._in_a_row

    def note_progress(self) -> None:
        """Allows all restarts again."""
        self._in_a_row = 0

    def next_pause(self) -> float:
        """Takes one of the restarts that are left; returns the seconds to wait before it."""
        self._in_a_row += 1
        self.total += 1
        return restart_pause(self._in_a_row, self._first_pause)


SUPERVISOR = "HUBRING_SUPERVISOR"
"""Environment variable with the id of the process that starts this program again."""
STEADY_SECONDS = 600.0
"""A program that ran this long has made progress: all restarts are allowed again."""


def is_supervised(variables: Mapping[str, str]) -> bool:
    """Whether a parent starts this process again; a process that a script starts is not meant."""
    return variables.get(SUPERVISOR) == str(os.getppid())


class SupervisedRun(Protocol):
    """One run of a program; a `Child` is one."""

    @property
    def ended(self) -> str:
        """How it ended, as a clause."""

    def signal(self, number: int) -> None:
        """Passes a signal on."""

    def exit_code(self) -> int:
        """Waits for the end."""

    def kill(self) -> None:
        """Ends what it left behind."""


def as_child(name: str, module: str, variables: Mapping[str, str]) -> Callable[[], SupervisedRun]:
    """Returns what runs a program as a child of this process.

    Args:
        name: The program's name in messages.
        module: Its module, which gets the arguments of this process.
        variables: The environment variables of this process.
    """
    command, own = module_command(module, *sys.argv[1:]), str(os.getpid())
    return lambda: Child(name, command, {**variables, SUPERVISOR: own, PARENT_VARIABLE: own})


def supervise(
    name: str, begin: Callable[[], SupervisedRun], restarts: Restarts, start: Callable[[], str] = lambda: ""
) -> int:
    """Runs a program until it ends in a way that a restart does not help.

    Args:
        name: The program's name in messages.
        begin: Begins a run.
        restarts: How many restarts are allowed.
        start: Returns where the next run starts, in words; may be empty.

    Returns:
        The program's exit code.
    """
    signals: list[int] = []
    runs: list[SupervisedRun] = []

    def forward(number: int) -> None:
        signals.append(number)
        for run in runs[-1:]:
            run.signal(number)

    with passing_on(STOP_SIGNALS, forward):
        while True:
            began = time.monotonic()
            run = begin()
            runs.append(run)
            code = run.exit_code()
            run.kill()
            if time.monotonic() - began > STEADY_SECONDS:
                restarts.note_progress()
            again = restart_helps(code) or (restarts.total and code == ConfigError.exit_code)
            if signals or not again or not restarts.left:
                return code
            pause = restarts.next_pause()
            text = f"{name}: it {run.ended}; restarting it in {pause:g} s {start()}".rstrip()
            print(f"{text} ({restarts.left} left)", file=sys.stderr, flush=True)
            if stopped := wait_to_restart(pause, signals):
                return stopped


log = logging.getLogger(__name__)

YOUNG_SECONDS = 60.0
"""A process that ran this long is not young."""


class Replacements:
    """Starts the standbys of one host.

    Args:
        wanted: How many shards and standbys the host has.
        start: Starts a standby.
        now: Returns seconds.
    """

    def __init__(
        self, wanted: int, start: Callable[[], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._wanted, self._start, self._now = wanted, start, now
        self._young = 0
        """How many processes ended young, one after another."""
        self._due = -math.inf

    def note(self, what: str, age: float) -> None:
        """Notes that a process ended.

        Args:
            what: Which process ended and how, in words.
            age: How many seconds it ran.
        """
        self._young = 0 if age >= YOUNG_SECONDS else self._young + 1
        pause = restart_pause(self._young - 1) if self._young > 1 else 0.0
        self._due = self._now() + pause
        log.warning("%s; starting a standby%s", what, f" in {pause:g} s" if pause else "")

    def fill(self, running: int) -> None:
        """Starts what is missing, once the pause is over; `running` processes have not ended."""
        if self._now() >= self._due:
            for _ in range(running, self._wanted):
                self._start()
