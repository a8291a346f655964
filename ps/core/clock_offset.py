"""Measures the offset between two processes' clocks by the midpoint of a round trip (NTP, RFC 5905, 8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

TRIES = 8
"""Number of round trips. The shortest one is used."""


class Offset(NamedTuple):
    """A clock offset in nanoseconds.

    `ahead` is exact if request and answer travel equally long. How the round trip divides is unknown, so the
    error is at most half the round trip: 0.15 ms for 0.3 ms. The offset holds only at the time of the
    measurement: clocks that are not synchronised drift apart by up to about 50 us a second.
    """

    ahead: int
    """Add it to this clock's time to get the other clock's time."""
    round_trip: int


def measure(
    ask: Callable[[], int],
    now: Callable[[], int] = time.time_ns,
    passed: Callable[[], int] = time.monotonic_ns,
) -> Offset:
    """Measures the offset of another process's clock with `TRIES` round trips.

    Args:
        ask: Returns the other clock's time, in nanoseconds since 1970.
        now: Returns this clock's time, in nanoseconds since 1970.
        passed: A monotonic clock in nanoseconds, which times the round trips. With `now`, a clock set back
            during the measurement would make one round trip look shortest.
    """
    return min((_once(ask, now, passed) for _ in range(TRIES)), key=lambda found: found.round_trip)


def _once(ask: Callable[[], int], now: Callable[[], int], passed: Callable[[], int]) -> Offset:
    began, asked = passed(), now()  # within the round trip, so that a pause between the two lengthens it
    theirs = ask()
    answered, ended = now(), passed()
    return Offset(theirs - (asked + answered) // 2, ended - began)
