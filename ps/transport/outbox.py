"""What waits for a wire, and how much of it the wire may hold at a time.

Law: the highest priority leaves first, of equals the earliest, and what is under
way comes to no more than the window, or is one item alone. So an urgent message
overtakes all that waits, and a slow peer costs references to payloads rather
than copies of them.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")

WINDOW = 8 << 20
"""Bytes: two slices, one that the kernel is taking and one that is ready when it has.

Measured on loopback, where it matters most: 100 MB there and back take 3 to 5 % longer than without a bound,
16 MiB would give back half of that, and at 1 Gbit/s every MiB is 8 ms that an urgent message waits.
"""


def _nothing() -> None:
    """Who asks for the next item by itself need not be told of room."""


class Outbox(Generic[_T]):
    """Any thread may put and take. A wire that takes one item at a time iterates, any other calls `take`.

    Args:
        on_room: Called, in whatever thread calls `left`, when something that waits may find room now.
        window: Bytes that may be under way; unbounded unless given.
    """

    def __init__(self, on_room: Callable[[], None] = _nothing, window: int = sys.maxsize) -> None:
        self._on_room = on_room
        self._window = window
        self._heap: list[tuple[int, int, int, _T]] = []
        self._numbers = itertools.count()
        self._under_way = 0
        self._left: deque[int] = deque()
        self._watches: dict[int, weakref.ref[memoryview]] = {}
        """A reference that nobody holds calls nobody."""
        self._closed = False
        self._changed = threading.Condition()
        self._takers = 0

    def __len__(self) -> int:
        """How many items wait."""
        return len(self._heap)

    @property
    def idle(self) -> bool:
        """Nothing waits, and nothing is under way."""
        with self._changed:
            self._count_what_left()
            return not self._heap and not self._under_way

    def put(self, item: _T, priority: int = 0, nbytes: int = 0) -> None:
        """Adds an item, which will take `nbytes` of the window; never blocks."""
        with self._changed:
            if not self._closed:
                heapq.heappush(self._heap, (-priority, next(self._numbers), nbytes, item))
                if self._takers:
                    self._changed.notify()

    def take(self, *, at_any_rate: bool = False) -> _T | None:
        """The next item, if there is room for it; it is under way from here on.

        Args:
            at_any_rate: There is no later: let it go without room.
        """
        with self._changed:
            self._count_what_left()
            if not self._heap:
                return None
            nbytes = self._heap[0][2]
            if self._under_way and self._under_way + nbytes > self._window and not at_any_rate:
                return None
            self._under_way += nbytes
            return heapq.heappop(self._heap)[3]

    def left(self, nbytes: int) -> None:
        """So many bytes are no longer under way: the kernel has them, or the peer is gone.

        Takes no lock, since it may run wherever the last reference to a payload goes.
        """
        self._left.append(nbytes)  # first, so that whoever puts meanwhile either sees it or is told
        if self._heap:
            self._on_room()

    def watch(self, view: memoryview) -> memoryview:
        """The same view, whose bytes have `left` once nobody holds it any more."""
        number, nbytes = next(self._numbers), view.nbytes

        def gone(_: weakref.ref[memoryview]) -> None:
            del self._watches[number]
            self.left(nbytes)

        self._watches[number] = weakref.ref(view, gone)
        return view

    def close(self) -> None:
        """Takes no more in, and ends every iteration once what was put in before has left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[_T]:
        """Takes items out as they come, with no regard to the window."""
        while self._await_item():
            item = self.take(at_any_rate=True)
            if item is not None:  # else another taker was faster
                yield item

    def _await_item(self) -> bool:
        """Waits for an item; False when none will come."""
        with self._changed:
            self._takers += 1
            self._changed.wait_for(lambda: self._heap or self._closed)
            self._takers -= 1
            return bool(self._heap)

    def _count_what_left(self) -> None:
        while self._left:
            self._under_way -= self._left.popleft()
