"""A wire with latency.

Law: a frame leaves `latency` seconds after it entered, plus or minus up to `jitter`, and never before an
earlier frame. So a frame with a long delay holds up those close behind it, like a queue in a network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

from hubring.workers.compare.experiment.setting import Link


class Wire:
    """Frames in flight from one host.

    Args:
        link: Link of the host; its rate is ignored.
        seed: Seed of the jitter.

    Attributes:
        nbytes: Bytes in flight.
    """

    def __init__(self, link: Link, seed: str) -> None:
        self.nbytes = 0
        self._latency, self._jitter = link.latency, link.jitter
        self._random = Random(seed)  # noqa: S311 - no secret
        self._frames: deque[tuple[float, bytes]] = deque()
        self._last = 0.0

    @property
    def due(self) -> float:
        """Time at which the next frame leaves; infinity if there is none."""
        return self._frames[0][0] if self._frames else float("inf")

    def put(self, frame: bytes, now: float) -> None:
        """Adds a frame."""
        delay = self._latency
        if self._jitter:
            delay += self._random.uniform(-self._jitter, self._jitter)
        self._last = max(self._last, now + delay)
        self._frames.append((self._last, frame))
        self.nbytes += len(frame)

    def take(self, now: float) -> Iterator[bytes]:
        """Yields the frames that have left by `now`, in the order in which they entered."""
        while self._frames and self._frames[0][0] <= now:
            frame = self._frames.popleft()[1]
            self.nbytes -= len(frame)
            yield frame
