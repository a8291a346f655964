"""How many probes a server answers at once: their callers have no token, and may be anybody.

Law: a probe takes memory until its message has come and its reply was read, and both may never happen. So few
probes wait for their message, and a further one ends the oldest: the message of an honest caller comes with
the call. Nothing ends a reply that its caller does not read on an event loop, so those are counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import grpc

from hubring.ps.transport.host import network_of

MESSAGE_BYTES = 1024
"""Maximum bytes of a probe's message: the name of a service."""

MOST_WAITING = 4
"""Probes that wait for their message. It can have as many bytes as the server takes of members."""

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
            oldest = next(iter(self._ends)) if len(self._ends) > MOST_WAITING else None
            if oldest is not None:
                del self._ends[oldest]
        if oldest is not None:
            oldest()

    def leave(self, end: Callable[[], object]) -> None:
        """Removes a probe, if it is still there."""
        with self._lock:
            self._ends.pop(end, None)


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
