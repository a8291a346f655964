"""Numbers a worker's calls to one shard and records which calls have their reply."""

from __future__ import annotations

import threading

MOST_CLOSED = 256
"""Maximum number of closed calls that one message lists: headers are small."""


class CallIds:
    """Numbers calls from 1. Safe to use from any thread.

    Invariant: the number of an open call is above `settled` and is never listed as closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, None] = {}
        """In ascending order."""
        self._closed: list[int] = []
        """Closed calls that no message has listed yet."""

    def open(self) -> tuple[int, int, tuple[int, ...]]:
        """Opens a call.

        Returns:
            The call's number; `settled`, up to which all calls are closed; and closed calls above it.
            A closed call is returned once.
        """
        with self._lock:
            self._last += 1
            self._open[self._last] = None
            settled = next(iter(self._open)) - 1
            beyond = [number for number in self._closed if number > settled]
            self._closed = beyond[MOST_CLOSED:]
            return self._last, settled, tuple(beyond[:MOST_CLOSED])

    def close(self, number: int) -> None:
        """Closes a call that has its reply and will not ask for it again."""
        with self._lock:
            del self._open[number]
            self._closed.append(number)
