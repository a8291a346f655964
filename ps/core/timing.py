"""Clocks that tests can replace, the offset between two clocks, and how long this process waited.

The offset is measured by the midpoint of a round trip (NTP, RFC 5905, 8).

Law: a wait that ends much later than its limit contains a pause: the process was stopped, or its machine
slept or was overloaded. While a process is paused it hears from no other process, so it must not take its
own silence for theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import NamedTuple, Protocol

from hubring.ps.core.errors import DeadlineExceeded


class TimeSource(Protocol):
    """Monotonic seconds. Only differences are meaningful."""

    def now(self) -> float: ...


class SystemTime:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


CLEAR_GAIN = 0.05
"""A relative gain below this is noise."""


def fastest(seconds: Mapping[int, float]) -> int:
    """Returns the size with the lowest time, or the first size unless another is clearly faster."""
    default = next(iter(seconds))
    best = min(seconds, key=lambda size: seconds[size])
    return best if seconds[best] < (1 - CLEAR_GAIN) * seconds[default] else default


OFFSET_TRIES = 8
"""Number of round trips. The shortest one is used."""


class ClockOffset(NamedTuple):
    """A clock offset in nanoseconds.

    `ahead` is exact if request and answer travel equally long. How the round trip divides is unknown, so the
    error is at most half the round trip: 0.15 ms for 0.3 ms. The offset holds only at the time of the
    measurement: clocks that are not synchronised drift apart by up to about 50 us a second.
    """

    ahead: int
    """Add it to this clock's time to get the other clock's time."""
    round_trip: int


def measure_offset(
    ask: Callable[[], int],
    now: Callable[[], int] = time.time_ns,
    passed: Callable[[], int] = time.monotonic_ns,
) -> ClockOffset:
    """Measures the offset of another process's clock with `OFFSET_TRIES` round trips.

    Args:
        ask: Returns the other clock's time, in nanoseconds since 1970.
        now: Returns this clock's time, in nanoseconds since 1970.
        passed: A monotonic clock in nanoseconds, which times the round trips. With `now`, a clock set back
            during the measurement would make one round trip look shortest.
    """
    tries = (_measure_once(ask, now, passed) for _ in range(OFFSET_TRIES))
    return min(tries, key=lambda found: found.round_trip)


def _measure_once(ask: Callable[[], int], now: Callable[[], int], passed: Callable[[], int]) -> ClockOffset:
    began, asked = passed(), now()  # within the round trip, so that a pause between the two lengthens it
    theirs = ask()
    answered, ended = now(), passed()
    return ClockOffset(theirs - (asked + answered) // 2, ended - began)


LATE_WAIT_SECONDS = 0.5
"""A wait may end this much later than its limit on a busy machine."""


class Pauses:
    """Adds up the pauses of this process.

    Args:
        clock: The source of the time.

    Attributes:
        seconds: Length of the pauses since the last `clear`, including the waits in which they fell.
    """

    def __init__(self, clock: TimeSource | None = None) -> None:
        self.seconds = 0.0
        self._clock = clock or SystemTime()

    @contextmanager
    def within(self, limit: float) -> Iterator[None]:
        """Encloses a wait that ends after `limit` seconds at the latest."""
        began = self._clock.now()
        try:
            yield
        finally:
            took = self._clock.now() - began
            if took > limit + LATE_WAIT_SECONDS:
                self.seconds += took

    def clear(self) -> None:
        """Forgets the pauses, because they had no consequences."""
        self.seconds = 0.0


LOG_WAIT_EVERY = 10.0
"""Seconds between log lines about a long wait."""


class Waiting:
    """A context that waiting threads enter and another thread reads. The longest wait counts.

    Attributes:
        slowest: The worker that the others wait for, in words; empty if the server knows none. A
            DeadlineExceeded that leaves the context names it.
    """

    def __init__(self, clock: TimeSource | None = None) -> None:
        self.slowest = ""
        self._clock = clock or SystemTime()
        self._waits: list[tuple[int, float]] = []
        """Thread and beginning of each wait, also within a wait. Each change is a single operation."""
        self._logged: tuple[float, int] | None = None

    def __enter__(self) -> None:
        if not self._waits:
            self.slowest = ""
        self._waits.append((get_ident(), self._clock.now()))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        own = get_ident()
        self._waits.remove(max(wait for wait in self._waits.copy() if wait[0] == own))
        named = error is not None and isinstance(error.__cause__, DeadlineExceeded)  # by an inner wait
        if isinstance(error, DeadlineExceeded) and self.slowest and not named:
            raise DeadlineExceeded(f"{error}. The slowest is {self.slowest}") from error

    @property
    def seconds(self) -> float:
        """Seconds since the longest wait began; 0 if no thread waits."""
        since = self._since()
        return 0.0 if since is None else self._clock.now() - since

    def longest(self) -> tuple[int, float] | None:
        """Returns the thread that has waited longest, and for how many seconds; None if no thread waits."""
        waits = self._waits.copy()
        if not waits:
            return None
        thread, since = min(waits, key=lambda wait: wait[1])
        return thread, self._clock.now() - since

    def due(self) -> float | None:
        """Returns the seconds waited, once every LOG_EVERY seconds, and None in between."""
        since = self._since()
        if since is None:
            return None
        seconds = self._clock.now() - since
        wait = (since, int(seconds / LOG_WAIT_EVERY))
        if seconds < LOG_WAIT_EVERY or wait == self._logged:
            return None
        self._logged = wait
        return seconds

    def _since(self) -> float | None:
        return min((began for _, began in self._waits.copy()), default=None)


def wait_message(seconds: float, step: int, slowest: str) -> str:
    """Formats the log line of a waiting worker.

    `slowest` is empty if all workers wait, or if there is no other worker.
    """
    waited = f"waiting for {seconds:.0f} s at step {step}"
    if not slowest:
        return (
            f"{waited}: no other worker is behind. Check that all ranks call the same collectives and that"
            " the hub is not overloaded"
        )
    return (
        f"{waited}: the slowest is {slowest}. It computes, loads data or hangs; see its log, or its stack:"
        " py-spy dump --pid PID"
    )
