"""A wire that takes its time.

The law: a frame comes out `latency` seconds after it went in, give or take up to `jitter`, and never
before one that went in earlier. So where frames follow each other closely, one that was drawn a long
delay holds up those behind it, as a queue on the way would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

from hubring.workers.compare.experiment.setting import Link


class Wire:
    """Frames of one host that are on their way.

    Args:
        link: What joins the host to the others; its rate is not looked at.
        seed: Of the jitter.

    Attributes:
        nbytes: What is on its way.
    """

    def __init__(self, link: Link, seed: str) -> None:
        self.nbytes = 0
        self._latency, self._jitter = link.latency, link.jitter
        self._random = Random(seed)  # noqa: S311 - no secret
        self._frames: deque[tuple[float, bytes]] = deque()
        self._last = 0.0

    @property
    def due(self) -> float:
        """When the next frame comes out; infinity if none is on its way."""
        return self._frames[0][0] if self._frames else float("inf")

    def put(self, frame: bytes, now: float) -> None:
        """Lets a frame in."""
        delay = self._latency
        if self._jitter:
            delay += self._random.uniform(-self._jitter, self._jitter)
        self._last = max(self._last, now + delay)
        self._frames.append((self._last, frame))
        self.nbytes += len(frame)

    def take(self, now: float) -> Iterator[bytes]:
        """The frames that are out by now, in the order in which they went in."""
        while self._frames and self._frames[0][0] <= now:
            frame = self._frames.popleft()[1]
            self.nbytes -= len(frame)
            yield frame
