"""Notices that a shard is silent while requests wait for it.

Law: a shard is silent once nothing has come from it for SECONDS, counted from the first request if none
waited. A waiting request is late once SECONDS have passed since it was sent, and the time that its bytes take
on the slowest link. A silent shard is asked, every SECONDS, which of the late requests it does not have. So a
lost message costs seconds, not the deadline, and a request that waits for other workers costs a few bytes.
"""

from __future__ import annotations

SECONDS = 5.0
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""What remains of 40 Mbit/s for one of four workers."""


class ShardSilence:
    """The silence of one shard. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0

    def sent(self, now: float) -> None:
        """Records a request."""
        if not self._waiting:
            self._since = now
        self._waiting += 1

    def answered(self, now: float) -> None:
        """Records the answer to a request."""
        self._waiting -= 1
        self._since = now

    def left(self, now: float) -> float | None:
        """Returns the seconds until the shard counts as silent; None if no request waits."""
        return max(0.0, self._since + SECONDS - now) if self._waiting else None

    def over(self, now: float) -> bool:
        """Whether the shard is silent. If it is, the next SECONDS begin."""
        silent = self.left(now) == 0
        if silent:
            self._since = now
        return silent


def late(sent: float, nbytes: int, now: float) -> bool:
    """Whether a request of `nbytes`, with its reply, should have been answered by now."""
    return now >= sent + SECONDS + nbytes / SLOWEST_BYTES_PER_SECOND
