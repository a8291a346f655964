"""A client's unanswered requests: those that wait for their send window, and those under way."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from time import monotonic

from hubring.ps.client import shard_silence
from hubring.ps.client.inflight import Inflight
from hubring.ps.client.send_window import SendWindow
from hubring.ps.client.shard_silence import ShardSilence


class Requests:
    """The unanswered requests to a set of shards. Safe from any thread.

    Args:
        shards: Number of shards.
        bounded: Whether `hubring.ps.client.send_window` limits the unanswered bytes of each shard.

    Attributes:
        failure: Why no request is accepted any more; None while requests are.
    """

    def __init__(self, shards: int, *, bounded: bool) -> None:
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._windows = [SendWindow[Inflight](bounded=bounded) for _ in range(shards)]
        self._silences = [ShardSilence() for _ in range(shards)]
        self._under_way: dict[int, Inflight] = {}

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its send window."""
        return any(self._windows)

    def put(self, call: Inflight) -> BaseException | None:
        """Adds a request; returns the failure if none is accepted."""
        with self._lock:
            if self.failure is None:
                self._windows[call.shard].put(call, call.message.priority, call.nbytes)
            return self.failure

    def next(self, shard: int) -> Inflight | None:
        """Returns the next request to send, which is under way from now on; None if none may be sent."""
        with self._lock:
            now = monotonic()
            call = self._windows[shard].take(now)
            if call is not None:
                self._under_way[call.number] = call
                self._silences[shard].sent(now)
            return call

    def take(self, number: int) -> Inflight | None:
        """Removes a request that is answered; None if it is not under way."""
        with self._lock:
            call = self._under_way.pop(number, None)
            if call is not None:
                now = monotonic()
                self._windows[call.shard].answered(call.nbytes, now)
                self._silences[call.shard].answered(now)
            return call

    def under_way(self, numbers: Iterable[int]) -> list[Inflight]:
        """Returns those of these requests that are under way."""
        with self._lock:
            return [self._under_way[number] for number in numbers if number in self._under_way]

    def unanswered(self, shard: int) -> list[Inflight]:
        """Returns a shard's requests under way, in the order of their numbers."""
        with self._lock:
            return [call for _, call in sorted(self._under_way.items()) if call.shard == shard]

    def heard(self, shard: int) -> None:
        """Records that something came from a shard."""
        with self._lock:
            self._silences[shard].heard(monotonic())

    def late(self, shard: int) -> tuple[list[int], bool]:
        """Returns the numbers of a silent shard's late requests, and whether its connection is stuck.

        The list is empty if the shard is not silent. The caller asks the shard about these requests.
        """
        with self._lock:
            now, silence = monotonic(), self._silences[shard]
            if silence.left(now) != 0:
                return [], False
            calls = [call for call in self._under_way.values() if call.shard == shard]
            first, stuck = min((call.late_at for call in calls), default=now), silence.asked
            if first > now:
                silence.await_late(first)
                return [], False
            # Those that are late soon were probably lost with the first.
            late = [call for call in calls if call.late_at <= now + shard_silence.ANSWER_SECONDS]
            if stuck:
                silence.heard(now)  # what replaces the connection has as long
            else:
                silence.ask(now, sum(call.total_bytes for call in late))
            return [call.number for call in late], stuck

    def sleep_seconds(self, left: float | None) -> float:
        """Returns the seconds to sleep: `left`, or less if a window opens or a shard may be silent."""
        with self._lock:
            now = monotonic()
            held = [window.patience(now) for window in self._windows if window]
            silent = [seconds for each in self._silences if (seconds := each.left(now)) is not None]
        # Another thread may send meanwhile, and wakes this one only if requests remain.
        waits = [*held, *silent, shard_silence.SECONDS]
        return min(waits if left is None else [left, *waits])

    def fail(self, error: BaseException) -> list[Inflight]:
        """Accepts no more requests. Removes and returns all; the first error counts."""
        with self._lock:
            self.failure = self.failure or error
            calls = [
                *self._under_way.values(),
                *(call for window in self._windows for call in window.clear()),
            ]
            self._under_way.clear()
            self._silences = [ShardSilence() for _ in self._silences]
            return calls
