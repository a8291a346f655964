"""Time as it would pass on a machine that has a core for everybody: a deadline of a test is in it."""

from __future__ import annotations

import time

from tests.support.processes.process_tree import descendants, entry, threads

LOAD = 10
"""So much slower than a wall clock it goes at worst: a machine may be that busy."""


class Stopwatch:
    """Counts from its making on, less what our programs waited for a core.

    On a quiet machine that is the time that passed. A busy one holds programs up, a second
    for each that it makes wait, and a deadline in seconds would miss what they would have done.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._look()

    @property
    def seconds(self) -> float:
        self._look()
        passed = time.monotonic() - self._began
        held_up = sum(last - self._first[thread] for thread, last in self._last.items()) / 1e9
        return max(passed - held_up, passed / LOAD)

    def _look(self) -> None:
        """Notes every thread's nanoseconds in line for a core: schedstat's second number (proc(5))."""
        for pid in descendants():
            for thread in threads(pid):
                if line := entry(pid, f"task/{thread}/schedstat"):
                    waited = int(line.split()[1])
                    self._first.setdefault(thread, waited)
                    self._last[thread] = waited
