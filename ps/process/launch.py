"""How Hubring starts a program as a child: its command line, its end with its parent, its signals.

Only the process that a person started handles the signals that ask a program to stop.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import NoReturn

from hubring.ps.core.standard_streams import flush_outputs


def module_command(
    module: str, *words: str, program: str = sys.executable, options: Sequence[str] = ()
) -> list[str]:
    """Returns the command line that runs a Hubring module.

    Args:
        module: The module's dotted name.
        words: Arguments.
        program: The Python interpreter.
        options: More options of the interpreter.
    """
    # -P: a file in the current directory must not hide a module of Hubring or of Python.
    return [program, *options, "-P", "-m", module, *words]


def module_exists(name: str) -> bool:
    """Whether `python -m name` finds at least the module's outermost package. Imports nothing."""
    outermost = name.partition(".")[0]
    return PathFinder.find_spec(outermost, [""]) is not None or find_spec(outermost) is not None


PARENT_VARIABLE = "HUBRING_PARENT"
"""Environment variable with the id of the process whose end ends this process."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Sends this process a signal when its parent ends.

    Args:
        parent: The process to follow. If it is not the parent, this process ends only if `parent` has
            ended already. 0 for none.
        number: The signal.
    """
    if os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    # The parent may have ended before prctl.
    if parent and not os.path.exists(f"/proc/{parent}"):
        signal.raise_signal(number)


def await_parent_end(parent: int, *also: int) -> None:
    """Waits until the parent has ended and closed its ports; not if it is no longer the parent.

    Args:
        parent: The parent's process id.
        also: Descriptors; the wait ends too when one is readable.
    """
    if os.getppid() != parent:
        return
    alive = os.pidfd_open(parent)
    if os.getppid() == parent:  # otherwise the descriptor may be of another process
        select.select([alive, *also], [], [])
    os.close(alive)


def kill_siblings(pids: Iterable[int], parent: int) -> None:
    """Kills those of the processes that are children of this process's parent."""
    import psutil  # takes about 20 ms to import

    for pid in pids if os.getppid() == parent else ():
        with suppress(psutil.NoSuchProcess):
            if (sibling := psutil.Process(pid)).ppid() == parent:
                sibling.kill()


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A terminal or a scheduler sends them to the whole group."""


@contextmanager
def stop_signals_held_back() -> Iterator[None]:
    """Starts children that have these signals blocked, until they `ignore` them: imports take seconds."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Ignores these signals, also those that came during the imports."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def end_after(run: Callable[[], object]) -> NoReturn:
    """Runs a fork's program, then ends as Python does, but unloads no modules: that copies their memory.

    So files that a program leaves open are not written. What Python prints at the exit is raised.
    """
    code = 0
    try:
        run()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_outputs()
    os._exit(code)
