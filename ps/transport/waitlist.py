"""What waits for one wire, and how much of it the wire may hold at a time.

Law: the message of the highest priority goes first, of equals the earliest, and
what is under way comes to no more than the window, or is one message alone. So
an urgent message overtakes all that waits, and a slow peer costs references to
payloads rather than copies of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from ps.transport.base import Message

WINDOW = 8 << 20
"""Bytes: two slices, one that the kernel is taking and one that is ready when it has.

Measured on loopback, where it matters most: 100 MB there and back take 3 to 5 % longer than without a bound,
16 MiB would give back half of that, and at 1 Gbit/s every MiB is 8 ms that an urgent message waits.
"""


class Waitlist:
    """The messages for one wire; `left` may be called from any thread, the rest from one.

    Args:
        on_room: Called, in whatever thread calls `left`, when something that waits may find room now.
        window: Bytes of payload that may be under way.
    """

    def __init__(self, on_room: Callable[[], None], window: int = WINDOW) -> None:
        self._on_room = on_room
        self._window = window
        self._waiting: list[tuple[int, int, Message]] = []
        self._numbers = itertools.count()
        self._under_way = 0
        self._left: deque[int] = deque()

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing waits, and nothing is under way."""
        self._count_what_left()
        return not self._waiting and not self._under_way

    def put(self, message: Message) -> None:
        """Queues a message; whoever put it takes what may go."""
        heapq.heappush(self._waiting, (-message.priority, next(self._numbers), message))

    def take(self, *, at_any_rate: bool = False) -> Message | None:
        """The next message, if there is room for it; from here on its payload is under way.

        Args:
            at_any_rate: There is no later: let it go without room.
        """
        self._count_what_left()
        if not self._waiting:
            return None
        nbytes = _nbytes(self._waiting[0][2])
        if self._under_way and self._under_way + nbytes > self._window and not at_any_rate:
            return None
        self._under_way += nbytes
        return heapq.heappop(self._waiting)[2]

    def left(self, nbytes: int) -> None:
        """So many bytes are no longer under way: the kernel has them, or the peer is gone."""
        self._left.append(nbytes)  # first, so that whoever puts meanwhile either sees it or is told
        if self._waiting:
            self._on_room()

    def _count_what_left(self) -> None:
        while self._left:
            self._under_way -= self._left.popleft()


def _nbytes(message: Message) -> int:
    return 0 if message.payload is None else message.payload.nbytes
