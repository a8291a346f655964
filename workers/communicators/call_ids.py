"""The numbers of a worker's calls to one shard, and to which of them it has had its replies."""

from __future__ import annotations

import threading

TOLD = 256
"""Most calls that are told as closed with another one: headers are small."""


class CallIds:
    """Counts calls from 1 upward; from any thread.

    Law: a call that was opened and not closed lies above `settled` and is never among those told as closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, None] = {}
        """In rising order."""
        self._closed: list[int] = []
        """Not told yet."""

    def open(self) -> tuple[int, int, tuple[int, ...]]:
        """A new call's number, that up to which all were closed, and others beyond; each is told once."""
        with self._lock:
            self._last += 1
            self._open[self._last] = None
            settled = next(iter(self._open)) - 1
            beyond = [number for number in self._closed if number > settled]
            self._closed = beyond[TOLD:]
            return self._last, settled, tuple(beyond[:TOLD])

    def close(self, number: int) -> None:
        """The call has had its reply, and asks for no other."""
        with self._lock:
            del self._open[number]
            self._closed.append(number)
