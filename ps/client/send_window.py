"""What waits on one line, and how far its worker may run ahead of the answers.

In lockstep a slice is answered once all have sent theirs, and a step ends with the last answer. Where workers
share the server's link, TCP gives more to whoever has more under way. One that gets ahead so gains nothing,
and delays all: the one behind sends its last slices alone, and the way back stands idle until they are there.

Law: the highest priority leaves first, of equals the earliest; nothing leaves once BYTES have no answer, or
the bytes of SLICES like the largest among them, whichever is more. Where no answer comes, nobody else is
sending, or others send in another order and wait for what is held back here. So that bound doubles with every
PATIENCE_SECONDS without an answer, and holds nothing back for long.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

_T = TypeVar("_T")

BYTES = 2 << 20
"""Of four workers on a server's link of 1 Gbit/s: what others bring meanwhile takes 50 ms."""
SLICES = 3
"""One that is summed, one that is arriving and one that is leaving."""
PATIENCE_SECONDS = 0.1
"""Longer than four workers' slices of 256 KiB take at 200 Mbit/s, and shorter than anybody's patience."""


class SendWindow(Generic[_T]):
    """One line's.

    Args:
        bounded: False where nobody is waited for, or no link is shared: then everything leaves at once.
    """

    def __init__(self, *, bounded: bool) -> None:
        self._bounded = bounded
        self._waiting: list[tuple[int, int, int, _T]] = []
        self._numbers = itertools.count()
        self._unanswered = 0
        self._largest = 0
        """Since last all was answered: small ones among large ones must not stop those."""
        self._heard = 0.0
        """When the last answer came, or the first began to be waited for."""

    def __bool__(self) -> bool:
        """Something waits."""
        return bool(self._waiting)

    def put(self, item: _T, priority: int, nbytes: int) -> None:
        """Adds what is to leave, with the bytes that it brings."""
        heapq.heappush(self._waiting, (-priority, next(self._numbers), nbytes, item))

    def take(self, now: float) -> _T | None:
        """What leaves next, if it may by now."""
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
        """Something that brought so many bytes has its answer."""
        self._unanswered -= nbytes
        self._heard = now

    def patience(self, now: float) -> float:
        """Seconds after which more may leave though no answer has come."""
        return PATIENCE_SECONDS - (now - self._heard) % PATIENCE_SECONDS

    def clear(self) -> list[_T]:
        """Takes out all that waits."""
        items = [item for *_, item in sorted(self._waiting, key=lambda one: one[:2])]
        self._waiting.clear()
        return items

    def _bound(self, now: float) -> int:
        silent = int((now - self._heard) / PATIENCE_SECONDS)
        return max(BYTES, SLICES * self._largest) << min(silent, 32)
