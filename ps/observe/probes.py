"""How many probes a server answers at once: their callers have no token, and may be anybody.

Law: a probe takes memory until its message has come and its reply was read, and both may never happen. So few
probes wait for their message, and a further one ends the oldest: the message of an honest caller comes with
the call. Nothing ends a reply that its caller does not read on an event loop, so those are counted.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from hubring.ps.transport.host import network_of

MESSAGE_BYTES = 1024
"""Maximum bytes of a probe's message: the name of a service."""

MOST_WAITING = 2
"""Probes that wait for their message, which may have up to 8 MiB, as the port also serves members."""

ADDRESS_UNREAD = 16
"""Maximum number of replies that the callers at one address have not read."""

MOST_UNREAD = 1024
"""The same for all addresses. Each takes 23 kB."""


class Refused(Exception):
    """A probe that gets no answer: the code and the text of its end."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Waiting:
    """The probes that end if too many others come. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[Callable[[], object], None] = {}

    def enter(self, end: Callable[[], object]) -> None:
        """Adds a probe.

        Args:
            end: Ends it, without blocking; called if it is the oldest one of too many.
        """
        with self._lock:
            self._ends[end] = None
            is_full = len(self._ends) > MOST_WAITING
        if is_full:
            self.end_oldest()

    def end_oldest(self) -> None:
        """Ends the oldest probe, if there is one."""
        with self._lock:
            oldest = next(iter(self._ends), None)
            if oldest is not None:
                del self._ends[oldest]
        if oldest is not None:
            oldest()

    def leave(self, end: Callable[[], object]) -> None:
        """Removes a probe, if it is still there."""
        with self._lock:
            self._ends.pop(end, None)


class Turns:
    """Lets few probes of an event loop wait for their message at once, or gRPC would receive all of them.

    While others wait for their turn, the oldest of those that have one ends.

    Args:
        waiting: Those that wait for their message.
    """

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._free = asyncio.Semaphore(MOST_WAITING)
        self._queued = 0

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the body."""
        self._queued += 1
        try:
            if self._free.locked():
                self._waiting.end_oldest()
            await self._free.acquire()
        finally:
            self._queued -= 1
        try:
            if self._queued:
                self._waiting.end_oldest()
            yield
        finally:
            self._free.release()


class Unread:
    """The replies that were not read yet."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, peer: str) -> Callable[[object], None]:
        """Counts a reply. Returns what removes it again.

        Args:
            peer: Its reader, as gRPC names it.

        Raises:
            Refused: This reader, or all together, have not read too many before.
        """
        place = _place(peer)
        if self._counts[place] >= ADDRESS_UNREAD or self._counts.total() >= MOST_UNREAD:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the replies to earlier probes were not read")
        self._counts[place] += 1

        def remove(_: object) -> None:
            self._counts -= Counter([place])  # without zeros

        return remove


def _place(peer: str) -> str:
    """Returns the network in `ipv4:ADDRESS:PORT` or `ipv6:%5BADDRESS%5D:PORT`."""
    address = peer.partition(":")[2].rpartition(":")[0]
    return network_of(address.removeprefix("%5B").removesuffix("%5D"))
