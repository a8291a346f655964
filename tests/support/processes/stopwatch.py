"""A clock for test deadlines that leaves out the time that programs wait for a core."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.support.processes.process_tree import descendants, entry, threads

LOAD = 10
"""The maximum factor by which the stopwatch is slower than a wall clock."""

PATIENCE = 30.0


class Stopwatch:
    """Counts the seconds since its creation, minus the time that programs under test waited for a core.

    On an idle machine this is wall-clock time. On a busy machine programs wait for a core, and a deadline in
    wall-clock seconds would be too short.
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
        """Records each thread's wait for a core in nanoseconds: schedstat's second number, see proc(5)."""
        for pid in descendants():
            for thread in threads(pid):
                if line := entry(pid, f"task/{thread}/schedstat"):
                    waited = int(line.split()[1])
                    self._first.setdefault(thread, waited)
                    self._last[thread] = waited


def until(condition: Callable[[], bool], what: Callable[[], object] = str) -> None:
    """Waits for a condition; the error shows `what` there is instead."""
    watch = Stopwatch()
    while not condition():
        assert watch.seconds < PATIENCE, what()
        time.sleep(0.01)
