"""When a program or a job that ended is started again.

Law: what ended because something was lost starts again: it exited with 69 or 75, or a signal killed it. What
would end in the same way again does not, such as a script that failed or a setting that is wrong. Restarts
without progress are limited, and each waits longer than the one before.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from hubring.ps.core.errors import Preempted, ServerUnreachable

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


def helps(code: int) -> bool:
    """Returns whether a restart can help what ended with this exit code; 128+n after signal n."""
    return code in RESTARTABLE


def wait(seconds: float, signals: Sequence[int]) -> int:
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


def pause_after(failures: int, first: float = FIRST_PAUSE_SECONDS) -> float:
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
        return pause_after(self._in_a_row, self._first_pause)
