"""Which streams a listener keeps open.

Law: a stream has a place while it is open. The places are bounded, in total and for each address, because
each stream costs two threads. Once the places are taken, a stream that sent nothing within SILENT_SECONDS
gives its place to a new one, the oldest first. Before that, silence is no fault: a worker may connect long
before it pushes, and one of its streams may never be needed. A stream that finds no place is refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hubring.ps.core.rejections import Rejections

log = logging.getLogger(__name__)

MAX_STREAMS = 1024
"""Maximum number of open streams of one listener."""

ADDRESS_STREAMS = 256
"""Maximum number of open streams of one IP address: 128 workers on one host, with two streams each."""

SILENT_SECONDS = 10.0
"""How long a stream keeps its place without a message if all places are taken."""


@dataclass(eq=False, slots=True)
class Place:
    """The place of one stream.

    Attributes:
        address: The peer's IP address.
        since: When the stream was opened, in monotonic seconds.
        end: Ends the stream; called if another stream gets its place.
        silent: Whether the stream has sent no message yet.
    """

    address: str
    since: float
    end: Callable[[], None]
    silent: bool = field(default=True)


class OpenStreams:
    """The places of one listener. Any thread may call it.

    Args:
        rejections: Counts refused and silent streams.
    """

    def __init__(self, rejections: Rejections) -> None:
        self._rejections = rejections
        self._lock = threading.Lock()
        self._places: dict[Place, None] = {}
        """In the order in which they were taken."""

    def take(self, peer: str, now: float, end: Callable[[], None]) -> Place | None:
        """Returns a place for a new stream, or None if all are taken.

        Args:
            peer: The peer as gRPC names it: `ipv4:ADDRESS:PORT` or `ipv6:[ADDRESS]:PORT`.
            now: Monotonic seconds.
            end: Ends the stream. It must not block.
        """
        place = Place(peer.rpartition(":")[0], now, end)
        with self._lock:
            if rivals := self._rivals(place):
                silent = (one for one in rivals if one.silent and now - one.since > SILENT_SECONDS)
                oldest = next(silent, None)
                if oldest is None:
                    self._rejections.add("streams", log, f"refused a stream of {peer}: all places are taken")
                    return None
                del self._places[oldest]
                text = f"closed a stream of {oldest.address} that sent nothing, to make room for {peer}"
                self._rejections.add("silent stream", log, text)
                oldest.end()
            self._places[place] = None
        return place

    def _rivals(self, place: Place) -> list[Place]:
        """Returns the streams of which one must end before this one has a place, oldest first."""
        same = [other for other in self._places if other.address == place.address]
        if len(same) >= ADDRESS_STREAMS:
            return same
        return list(self._places) if len(self._places) >= MAX_STREAMS else []

    def leave(self, place: Place) -> None:
        """Frees the place of a stream that ended."""
        with self._lock:
            self._places.pop(place, None)

    def end(self) -> None:
        """Ends all streams."""
        with self._lock:
            for place in self._places:
                place.end()
