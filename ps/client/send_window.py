"""A priority queue of requests for one shard, and a limit on unanswered bytes.

In lockstep modes the shard answers a slice once all workers have sent theirs. A step ends with the last
answer. Where workers share the server's link, TCP gives a larger share to a worker with more bytes in
flight. A worker that gets ahead gains nothing and delays all: the slowest worker sends its last slices alone,
and the link back is idle until they arrive.

Law: the highest priority leaves first; among equals, the earliest. Nothing leaves while max(BYTES, SLICES x
the largest unanswered slice) bytes are unanswered. If no answer comes, either no other worker is sending, or
the workers send in different orders and wait for a request that is held back here. So the limit doubles after
every PATIENCE_SECONDS without an answer.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

_T = TypeVar("_T")

BYTES = 2 << 20
"""With four workers on a server link of 1 Gbit/s, these bytes from each of the other three take 50 ms."""
SLICES = 3
"""One being summed, one arriving, one leaving."""
PATIENCE_SECONDS = 0.1
"""Seconds. Longer than four workers' slices of 256 KiB take at 200 Mbit/s."""


class SendWindow(Generic[_T]):
    """The send window of one shard.

    Args:
        bounded: Whether unanswered bytes are limited. False where workers do not wait for each other or do
            not share a link.
    """

    def __init__(self, *, bounded: bool) -> None:
        self._bounded = bounded
        self._waiting: list[tuple[int, int, int, _T]] = []
        self._numbers = itertools.count()
        self._unanswered = 0
        self._largest = 0
        """Bytes of the largest request since the window was empty. Small requests do not lower the limit."""
        self._heard = 0.0
        """When the last answer came, or when the first request of an empty window was sent."""

    def __bool__(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    def put(self, item: _T, priority: int, nbytes: int) -> None:
        """Adds a request that sends `nbytes`."""
        heapq.heappush(self._waiting, (-priority, next(self._numbers), nbytes, item))

    def take(self, now: float) -> _T | None:
        """Returns the next request, or None if none waits or the limit is reached."""
        if not self._waiting:
            return None
        nbytes = self._waiting[0][2]
        if not self._unanswered:
            self._heard, self._largest = now, 0
        self._largest = max(self._largest, nbytes)
        if self._bounded and self._unanswered >= self._bound(now):
            return None
        self._unanswered += nbytes
        return heapq.heappop(self._waiting)[3]

    def answered(self, nbytes: int, now: float) -> None:
        """Records the answer to a request of `nbytes`."""
        self._unanswered -= nbytes
        self._heard = now

    def patience(self, now: float) -> float:
        """Seconds until the limit doubles if no answer comes."""
        return PATIENCE_SECONDS - (now - self._heard) % PATIENCE_SECONDS

    def clear(self) -> list[_T]:
        """Removes and returns all waiting requests."""
        items = [item for *_, item in sorted(self._waiting, key=lambda one: one[:2])]
        self._waiting.clear()
        return items

    def _bound(self, now: float) -> int:
        silent = int((now - self._heard) / PATIENCE_SECONDS)
        return max(BYTES, SLICES * self._largest) << min(silent, 32)
