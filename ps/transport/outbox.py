"""What waits in this process: the bytes of one peer, and a priority queue for a connection.

Law: the highest priority leaves first; among equals, the earliest. The bytes in flight do
not exceed the window, unless a single item does. So an urgent message overtakes all waiting
ones, and a slow peer costs references to payloads rather than copies.
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

from hubring.ps.transport.base import Message

BOUND = 16 << 20
"""Bytes that may wait before reading stops: a few slices, so that one arrives while another is summed.

100 MB there and back took 131 ms with 4 MiB, and 103 to 114 ms with 8 to 32 MiB.
"""

MESSAGE_BYTES = 64 << 10
"""Bytes that each message counts in addition to its own, which bounds the number of small messages."""


def weigh(message: Message) -> int:
    """Returns the bytes that a message counts in a backlog."""
    payload = message.payload.nbytes if message.payload is not None else 0
    return MESSAGE_BYTES + len(message.header) + payload


class Backlog:
    """Counts one peer's waiting bytes in both directions. The reader pauses at the bound.

    A peer that sends faster than it is served, or does not read its replies, fills this
    much memory here. Then the transport's flow control stops it. Requests that were read
    but not answered do not count: a round may need many more before it answers the first.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def full(self) -> bool:
        """Whether the bound is reached. It can be exceeded by less than one message."""
        return self._nbytes >= BOUND

    def add(self, nbytes: int) -> None:
        """Adds waiting bytes. Never blocks."""
        with self._changed:
            self._nbytes += nbytes

    def remove(self, nbytes: int) -> None:
        """Removes waiting bytes."""
        with self._changed:
            self._nbytes -= nbytes
            if not self.full:
                self._changed.notify_all()

    def await_room(self) -> None:
        """Blocks until the backlog is not full, or is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.full)

    def close(self) -> None:
        """Ends all waits, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


_T = TypeVar("_T")

WINDOW = 8 << 20
"""Bytes: two slices, one that the kernel is sending and one that is ready next.

Measured on loopback, where the cost is highest: 100 MB there and back take 3 to 5 % longer than without a
limit. 16 MiB would save half of that, but at 1 Gbit/s an urgent message waits 8 ms per MiB.
"""


def _nothing() -> None:
    """The default `on_room`: does nothing."""


class Outbox(Generic[_T]):
    """A queue that any thread may use.

    A transport that sends one item at a time iterates over it. Other transports call `take`.

    Args:
        on_room: Called in the thread that calls `left` when a waiting item may fit the window.
        window: Maximum bytes in flight; unlimited by default.
    """

    def __init__(self, on_room: Callable[[], None] = _nothing, window: int = sys.maxsize) -> None:
        self._on_room = on_room
        self._window = window
        self._heap: list[tuple[int, int, int, _T]] = []
        self._numbers = itertools.count()
        self._under_way = 0
        self._left: deque[int] = deque()
        self._watches: dict[int, weakref.ref[memoryview]] = {}
        """Keeps the weak references alive. A dead reference would not call its callback."""
        self._closed = False
        self._changed = threading.Condition()
        self._takers = 0

    def __len__(self) -> int:
        """The number of waiting items."""
        return len(self._heap)

    @property
    def idle(self) -> bool:
        """Whether no item waits and no bytes are in flight."""
        with self._changed:
            self._count_what_left()
            return not self._heap and not self._under_way

    def put(self, item: _T, priority: int = 0, nbytes: int = 0) -> None:
        """Adds an item of `nbytes`. Never blocks."""
        with self._changed:
            if not self._closed:
                heapq.heappush(self._heap, (-priority, next(self._numbers), nbytes, item))
                if self._takers:
                    self._changed.notify()

    def take(self, *, force: bool = False) -> _T | None:
        """Returns the next item if it fits the window. The item is in flight from then on.

        Args:
            force: Ignore the window, because there is no later call.
        """
        with self._changed:
            self._count_what_left()
            if not self._heap:
                return None
            nbytes = self._heap[0][2]
            if self._under_way and self._under_way + nbytes > self._window and not force:
                return None
            self._under_way += nbytes
            return heapq.heappop(self._heap)[3]

    def left(self, nbytes: int) -> None:
        """Records that `nbytes` are no longer in flight: the kernel has them, or the peer is gone.

        Takes no lock, since it can run wherever the last reference to a payload is dropped.
        """
        self._left.append(nbytes)  # first, so that a concurrent `put` either counts it or gets `on_room`
        if self._heap:
            self._on_room()

    def watch(self, view: memoryview) -> memoryview:
        """Returns the view. Its bytes have `left` once nothing holds it."""
        number, nbytes = next(self._numbers), view.nbytes

        def gone(_: weakref.ref[memoryview]) -> None:
            del self._watches[number]
            self.left(nbytes)

        self._watches[number] = weakref.ref(view, gone)
        return view

    def close(self) -> None:
        """Accepts no more items. Iteration ends once all earlier items are taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[_T]:
        """Yields items as they arrive, without regard to the window."""
        while self._await_item():
            item = self.take(force=True)
            if item is not None:  # else another thread took it
                yield item

    def _await_item(self) -> bool:
        """Waits for an item. Returns False when no more will come."""
        with self._changed:
            self._takers += 1
            self._changed.wait_for(lambda: self._heap or self._closed)
            self._takers -= 1
            return bool(self._heap)

    def _count_what_left(self) -> None:
        while self._left:
            self._under_way -= self._left.popleft()
