"""The numbers of a worker's calls, and up to which one it has had its replies."""

from __future__ import annotations

import threading


class Roll:
    """Counts calls from 1 upward; from any thread.

    Law: a call that was opened and not closed lies above `settled`, for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, None] = {}
        """In rising order."""

    def open(self) -> tuple[int, int]:
        """A new call's number, and that up to which all were closed."""
        with self._lock:
            self._last += 1
            self._open[self._last] = None
            return self._last, next(iter(self._open)) - 1

    def close(self, number: int) -> None:
        """The call has had its reply, and asks for no other."""
        with self._lock:
            del self._open[number]
