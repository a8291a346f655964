"""Notices that a shard is silent while requests wait for it, and that its connection is stuck.

Law: a shard is silent once nothing has come from it for SECONDS, counted from the first request if none
waited, and a request is late: SECONDS have passed since it was sent, and the time that its bytes take on the
slowest link. A silent shard is asked which of the requests it does not have that are late, or will be within
ANSWER_SECONDS. It answers at once. If nothing comes within ANSWER_SECONDS, and the time of those bytes, the
connection is stuck. So a lost message costs seconds, not the deadline, and a request that waits for other
workers costs a few bytes.
"""

from __future__ import annotations

SECONDS = 5.0
ANSWER_SECONDS = 1.0
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""What remains of 40 Mbit/s for one of four workers."""


class ShardSilence:
    """The silence of one shard. Times are those of `time.monotonic`.

    Attributes:
        asked: Whether the shard was asked, and nothing has come since.
    """

    def __init__(self) -> None:
        self.asked = False
        self._waiting = 0
        self._until = 0.0

    def sent(self, now: float) -> None:
        """Records a request."""
        if not self._waiting:
            self.heard(now)
        self._waiting += 1

    def answered(self, now: float) -> None:
        """Records the answer to a request."""
        self._waiting -= 1
        self.heard(now)

    def heard(self, now: float) -> None:
        """Records that something came from the shard."""
        self._until, self.asked = now + SECONDS, False

    def ask(self, now: float, nbytes: int) -> None:
        """Records that the shard is asked about late requests, which send and expect `nbytes`."""
        self._until, self.asked = now + ANSWER_SECONDS + seconds_of(nbytes), True

    def await_late(self, time: float) -> None:
        """Waits until a request is late."""
        self._until = time

    def left(self, now: float) -> float | None:
        """Returns the seconds until the shard may be silent; None if no request waits."""
        return max(0.0, self._until - now) if self._waiting else None


def seconds_of(nbytes: int) -> float:
    """Returns how long so many bytes take on the slowest link."""
    return nbytes / SLOWEST_BYTES_PER_SECOND
