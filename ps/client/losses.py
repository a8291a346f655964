"""Counts how often each shard's connection breaks."""

from __future__ import annotations

import time
from collections import deque

from hubring.ps.core.errors import ConnectionLost

MAX_LOSSES = 10
"""Losses of one connection in the given seconds after which reconnecting stops."""


class Losses:
    """The losses of connections.

    Args:
        shards: Number of shards.
        seconds: The time in which MAX_LOSSES losses are too many.
    """

    def __init__(self, shards: int, seconds: float) -> None:
        self._seconds = seconds
        self._times: list[deque[float]] = [deque(maxlen=MAX_LOSSES) for _ in range(shards)]

    def note(self, shard: int, lost: ConnectionLost) -> None:
        """Records a loss.

        Raises:
            ConnectionLost: The connection breaks each time it is reconnected.
        """
        times = self._times[shard]
        times.append(time.monotonic())
        if len(times) == MAX_LOSSES and times[-1] - times[0] < self._seconds:
            raise ConnectionLost(
                f"the connection to shard {shard} broke {MAX_LOSSES} times within {self._seconds:g} s;"
                f" last error: {lost}. See the server's log for the cause"
            )
