"""How many probes a server answers at once: their callers have no token, and may be anybody.

Law: a probe takes memory until its message has come and its reply was read, and both may never happen. So few
probes wait for their message, and a further one ends the oldest. The message of an honest caller comes with
the call: on an event loop no probe ends before there was time to read it. Nothing ends a reply there that its
caller does not read, so a connection has few probes, and all together have a limit.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

MESSAGE_BYTES = 1024
"""Maximum bytes of a probe's message: the name of a service."""

MOST_WAITING = 2
"""Probes that wait for their message, which may have up to 8 MiB, as the port also serves members."""

TURN_SECONDS = 0.02
"""How long a probe may wait for its message while others wait for their turn."""

CONNECTION_OPEN = 4
"""Maximum number of probes of one connection: one for each service."""

MOST_OPEN = 1024
"""The same for all connections. Each takes 23 kB until its caller has read the reply."""


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
    """Lets few probes of an event loop read their message at once, or gRPC would receive all of them.

    A turn ends after TURN_SECONDS if others wait for theirs.

    Args:
        waiting: Those that have had their time, but whose message has not come.
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
            yield
        finally:
            self._free.release()

    async def use(self, work: asyncio.Future[object]) -> None:
        """Waits for what is done in a turn; cancels it if that takes too long while others wait."""
        for _ in range(2):  # on a busy loop one wait can end late, at the same time as the work
            await asyncio.wait([work], timeout=TURN_SECONDS / 2)
        if work.done():
            return
        self._waiting.enter(work.cancel)
        try:
            if self._queued:
                self._waiting.end_oldest()
            await asyncio.wait([work])
        finally:
            self._waiting.leave(work.cancel)


class Open:
    """The probes that are not over: their message has not come, or their reply was not read."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, connection: str) -> Callable[[object], None]:
        """Counts a probe. Returns what removes it again.

        Args:
            connection: The address and port of its caller, as gRPC names them.

        Raises:
            Refused: This connection, or all together, have too many.
        """
        if self._counts[connection] >= CONNECTION_OPEN or self._counts.total() >= MOST_OPEN:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many other probes are not over")
        self._counts[connection] += 1

        def remove(_: object) -> None:
            self._counts -= Counter([connection])  # without zeros

        return remove
