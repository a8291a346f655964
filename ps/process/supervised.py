"""A program that starts itself again: `ps-server start --restarts N` and `ps-worker --restarts N`.

Law: the process that a person starts begins each run, usually a child, and another one after a loss. A wrong
setting ends the first run for good. After a restart it may mean that what the lost process held is not free
yet, such as its rank, so it counts as a loss then.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from hubring.ps.core.errors import ConfigError
from hubring.ps.process.child import Child
from hubring.ps.process.children import passing_on
from hubring.ps.process.command import module_command
from hubring.ps.process.end_with_parent import PARENT
from hubring.ps.process.restarts import Restarts, helps, wait
from hubring.ps.process.stop_signals import STOP_SIGNALS

SUPERVISOR = "HUBRING_SUPERVISOR"
"""Environment variable with the id of the process that starts this program again."""
STEADY_SECONDS = 600.0
"""A program that ran this long has made progress: all restarts are allowed again."""


def is_supervised(variables: Mapping[str, str]) -> bool:
    """Whether a parent starts this process again; a process that a script starts is not meant."""
    return variables.get(SUPERVISOR) == str(os.getppid())


class Run(Protocol):
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


def as_child(name: str, module: str, variables: Mapping[str, str]) -> Callable[[], Run]:
    """Returns what runs a program as a child of this process.

    Args:
        name: The program's name in messages.
        module: Its module, which gets the arguments of this process.
        variables: The environment variables of this process.
    """
    command, own = module_command(module, *sys.argv[1:]), str(os.getpid())
    return lambda: Child(name, command, {**variables, SUPERVISOR: own, PARENT: own})


def supervise(
    name: str, begin: Callable[[], Run], restarts: Restarts, start: Callable[[], str] = lambda: ""
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
    runs: list[Run] = []

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
            again = helps(code) or (restarts.total and code == ConfigError.exit_code)
            if signals or not again or not restarts.left:
                return code
            pause = restarts.next_pause()
            text = f"{name}: it {run.ended}; restarting it in {pause:g} s {start()}".rstrip()
            print(f"{text} ({restarts.left} left)", file=sys.stderr, flush=True)
            if stopped := wait(pause, signals):
                return stopped
