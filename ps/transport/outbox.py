"""What waits for a wire, or for the first of several to be free."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Outbox(Generic[_T]):
    """The highest priority leaves first, and of equals the earliest; any thread may put and take."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _T]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a True for each item: it waits in C

    def put(self, item: _T, priority: int = 0) -> None:
        """Adds an item; never blocks."""
        with self._lock:
            heapq.heappush(self._heap, (-priority, next(self._numbers), item))
        self._tokens.put(True)

    def close(self) -> None:
        """Ends every iteration once what was put in before has left."""
        self._tokens.put(False)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[_T]:
        """Takes items out as they come."""
        while self._tokens.get():
            with self._lock:
                _, _, item = heapq.heappop(self._heap)
            yield item
        self._tokens.put(False)  # for whoever else takes from here
