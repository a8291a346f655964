"""A client's unanswered requests: those that wait for their send window, and those under way.

Law of silence: a shard is silent once nothing has come from it for SILENT_SECONDS, counted from the first
request if none waited, and a request is late: SILENT_SECONDS have passed since it was sent, and the time that
its bytes take on the slowest link. A silent shard is asked which of the requests it does not have that are
late, or will be within ANSWER_SECONDS. It answers at once. If nothing comes within ANSWER_SECONDS, and the
time of those bytes, the connection is stuck. So a lost message costs seconds, not the deadline, and a request
that waits for other workers costs a few bytes.

Each shard has a priority queue of requests, and a limit on unanswered bytes. In lockstep modes the shard
answers a slice once all workers have sent theirs. A step ends with the last answer. Where workers share the
server's link, TCP gives a larger share to a worker with more bytes in flight. A worker that gets ahead gains
nothing and delays all: the slowest worker sends its last slices alone, and the link back is idle until they
arrive.

Law of the send window: the highest priority leaves first; among equals, the earliest. Nothing leaves while
max(BYTES, SLICES x the largest unanswered slice) bytes are unanswered. If no answer comes, either no other
worker is sending, or the workers send in different orders and wait for a request that is held back here. So
the limit doubles after every PATIENCE_SECONDS without an answer.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar
from weakref import WeakSet

from hubring.ps.core.errors import ConnectionLost
from hubring.ps.core.messages import Reply
from hubring.ps.core.work import Work
from hubring.ps.transport.base import Message

_T = TypeVar("_T")

BYTES = 2 << 20
"""With four workers on a server link of 1 Gbit/s, these bytes from each of the other three take 50 ms."""
SLICES = 3
"""One being summed, one arriving, one leaving."""
PATIENCE_SECONDS = 0.1
"""Seconds. Longer than four workers' slices of 256 KiB take at 200 Mbit/s."""


class SendWindow(Generic[_T]):
    """The send window of one shard.

    Args:
        bounded: Whether unanswered bytes are limited. False where workers do not wait for each other or do
            not share a link.

    Attributes:
        waiting: The requests that have not left, as a heap.
    """

    def __init__(self, *, bounded: bool) -> None:
        self._bounded = bounded
        self.waiting: list[tuple[int, int, int, _T]] = []
        self._numbers = itertools.count()
        self._unanswered = 0
        self._largest = 0
        """Bytes of the largest request since the window was empty. Small requests do not lower the limit."""
        self._heard = 0.0
        """When the last answer came, or when the first request of an empty window was sent."""

    def put(self, item: _T, priority: int, nbytes: int) -> None:
        """Adds a request that sends `nbytes`."""
        heapq.heappush(self.waiting, (-priority, next(self._numbers), nbytes, item))

    def take(self, now: float) -> _T | None:
        """Returns the next request, or None if none waits or the limit is reached."""
        if not self.waiting:
            return None
        nbytes = self.waiting[0][2]
        if not self._unanswered:
            self._heard, self._largest = now, 0
        self._largest = max(self._largest, nbytes)
        if self._bounded and self._unanswered >= self._bound(now):
            return None
        self._unanswered += nbytes
        return heapq.heappop(self.waiting)[3]

    def answered(self, nbytes: int, now: float) -> None:
        """Records the answer to a request of `nbytes`."""
        self._unanswered -= nbytes
        self._heard = now

    def patience(self, now: float) -> float:
        """Seconds until the limit doubles if no answer comes."""
        return PATIENCE_SECONDS - (now - self._heard) % PATIENCE_SECONDS

    def clear(self) -> list[_T]:
        """Removes and returns all waiting requests."""
        items = [item for *_, item in sorted(self.waiting, key=lambda one: one[:2])]
        self.waiting.clear()
        return items

    def _bound(self, now: float) -> int:
        silent = int((now - self._heard) / PATIENCE_SECONDS)
        return max(BYTES, SLICES * self._largest) << min(silent, 32)


MAX_LOSSES = 10
"""Losses of one connection in the given seconds after which reconnecting stops."""

SILENT_SECONDS = 5.0
ANSWER_SECONDS = 1.0
MAX_PROBED = 1000  # in one probe, so that it fits a header
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""What remains of 40 Mbit/s for one of four workers."""


Settle = Callable[[Reply], object]
"""Applies a reply. An exception fails the work."""


@dataclass(slots=True)
class Inflight:
    """A request and what is needed to send it again and to settle its reply.

    Attributes:
        number: Identifies the request and its reply.
        shard: The shard that receives it.
        message: The encoded request.
        into: Where the reply's payload should land.
        settle: Applies the reply.
        work: The work that this request is one part of.
        nbytes: Payload bytes that the request sends.
        sent_at: When it was sent last, by `time.monotonic`.
        damaged: How often it or its reply did not match its checksum.
    """

    number: int
    shard: int
    message: Message
    into: memoryview | None
    settle: Settle
    work: Work
    nbytes: int
    sent_at: float = 0.0
    damaged: int = 0

    @property
    def total_bytes(self) -> int:
        """Payload bytes that the request sends and expects."""
        return self.nbytes + (0 if self.into is None else self.into.nbytes)

    @property
    def late_at(self) -> float:
        """When it should be answered, unless it waits for other workers."""
        return self.sent_at + SILENT_SECONDS + seconds_of(self.total_bytes)


class ShardSilence:
    """The silence of one shard. Times are those of `time.monotonic`.

    Attributes:
        asked: Whether the shard was asked, and nothing has come since.
        asked_all: Whether it was asked about all requests under way, and none came or went since.
        holds: Whether it has answered that it has all of them, and answers none.
    """

    def __init__(self) -> None:
        self.asked = self.asked_all = self.holds = False
        self._waiting = 0
        self._until = 0.0

    def sent(self, now: float) -> None:
        """Records a request."""
        if not self._waiting:
            self._until, self.asked = now + SILENT_SECONDS, False
        self._waiting += 1
        self.asked_all = self.holds = False

    def answered(self, now: float) -> None:
        """Records the answer to a request."""
        self._waiting -= 1
        self._until, self.asked = now + SILENT_SECONDS, False
        self.asked_all = self.holds = False

    def heard(self, now: float, *, holds: bool = False) -> None:
        """Records that something else came from the shard: that it `holds` what it was asked about."""
        self._until, self.asked = now + SILENT_SECONDS, False
        self.holds = holds and self.asked_all

    def ask(self, now: float, nbytes: int, *, asks_all: bool) -> None:
        """Records that the shard is asked about late requests, which send and expect `nbytes`."""
        self._until, self.asked = now + ANSWER_SECONDS + seconds_of(nbytes), True
        self.asked_all = asks_all

    def await_late(self, time: float) -> None:
        """Waits until a request is late."""
        self._until = time

    def left(self, now: float) -> float | None:
        """Returns the seconds until the shard may be silent; None if no request waits."""
        return max(0.0, self._until - now) if self._waiting else None


class Requests:
    """The unanswered requests to a set of shards. Safe from any thread.

    Args:
        shards: Number of shards.
        bounded: Whether a `SendWindow` limits the unanswered bytes of each shard.

    Attributes:
        failure: Why no request is accepted any more; None while requests are.
        waiting: The requests that wait for their send window, by shard: each window's own heap, so that no
            count can differ from it.
        silent_from: No shard is silent before, by `time.monotonic`.
    """

    def __init__(self, shards: int, *, bounded: bool) -> None:
        self.failure: BaseException | None = None
        self.silent_from = 0.0
        self._lock = threading.Lock()
        self._windows = [SendWindow[Inflight](bounded=bounded) for _ in range(shards)]
        self.waiting = [window.waiting for window in self._windows]
        self._silences = [ShardSilence() for _ in range(shards)]
        self._under_way: dict[int, Inflight] = {}

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

    def heard(self, shard: int, *, holds: bool = False) -> None:
        """Records that something other than an answer came from a shard: that it `holds` all requests."""
        with self._lock:
            self._silences[shard].heard(monotonic(), holds=holds)

    def held(self) -> bool:
        """Whether the shards have said that they have all requests, and wait with every answer."""
        with self._lock:
            asked = {call.shard for call in self._under_way.values()}
            return bool(asked) and not any(self.waiting) and all(self._silences[one].holds for one in asked)

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
            late = [call for call in calls if call.late_at <= now + ANSWER_SECONDS]
            if stuck:
                silence.heard(now)  # what replaces the connection has as long
            else:
                asks_all = len(late) == len(calls) <= MAX_PROBED
                silence.ask(now, sum(call.total_bytes for call in late), asks_all=asks_all)
            return [call.number for call in late], stuck

    def sleep_seconds(self, left: float | None) -> float:
        """Returns the seconds to sleep: `left`, or less if a window opens or a shard may be silent."""
        # Another thread may send meanwhile, and wakes this one only if requests remain.
        seconds = SILENT_SECONDS
        with self._lock:
            now = monotonic()
            for silence in self._silences:
                silent = silence.left(now)
                if silent is not None and silent < seconds:
                    seconds = silent
            self.silent_from = now + seconds
            for window in self._windows:
                if window.waiting:
                    seconds = min(seconds, window.patience(now))
        return seconds if left is None else min(left, seconds)

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


def seconds_of(nbytes: int) -> float:
    """Returns how long so many bytes take on the slowest link."""
    return nbytes / SLOWEST_BYTES_PER_SECOND


class Batch:
    """Holds requests back while it is open.

    Args:
        batches: The open batches. The references are weak: if an exception from a signal handler skips
            `__exit__`, the batch stops holding requests back once it is garbage-collected.
        on_exit: Called when the batch closes.
    """

    def __init__(self, batches: WeakSet[Batch], on_exit: Callable[[], None]) -> None:
        self._batches = batches
        self._on_exit = on_exit

    def __enter__(self) -> None:
        try:
            self._batches.add(self)
        except BaseException:  # raised by a signal handler after `add`: `__exit__` does not run
            self._batches.discard(self)
            raise

    def __exit__(self, *_: object) -> None:
        self._batches.discard(self)
        self._on_exit()


class Losses:
    """The losses of connections.

    Args:
        shards: The number of shards.
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
        times.append(monotonic())
        if len(times) == MAX_LOSSES and times[-1] - times[0] < self._seconds:
            raise ConnectionLost(
                f"the connection to shard {shard} broke {MAX_LOSSES} times within {self._seconds:g} s;"
                f" last error: {lost}. See the server's log for the cause"
            )
