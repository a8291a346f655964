"""How far another process's clock is ahead of ours, by the midpoint of a round trip (NTP, RFC 5905, 8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

TRIES = 8
"""Round trips that are taken; the shortest counts."""


class Offset(NamedTuple):
    """What was measured, in nanoseconds.

    If the other's answer was as long on its way as our question, `ahead` is exact. Nobody knows how the
    round trip divides, so it is true to half of that and no better: of 0.3 ms, to 0.15 ms. It holds for
    when it was measured; clocks that nobody disciplines drift apart by up to some 50 us a second after.
    """

    ahead: int
    """To be added to a time of ours for the other's."""
    round_trip: int

    @property
    def certain(self) -> bool:
        """Whether the clocks differ by more than the error: else they may as well be one clock."""
        return 2 * abs(self.ahead) > self.round_trip


def measure(
    ask: Callable[[], int],
    now: Callable[[], int] = time.time_ns,
    passed: Callable[[], int] = time.monotonic_ns,
) -> Offset:
    """Asks the other for its time, `TRIES` times.

    Args:
        ask: Returns the other's clock, in nanoseconds since 1970.
        now: Ours.
        passed: A clock of ours that is never set, by which round trips are taken: by one that is set back
            meanwhile, a round trip is shorter than any true one, and would win.
    """
    return min((_once(ask, now, passed) for _ in range(TRIES)), key=lambda found: found.round_trip)


def _once(ask: Callable[[], int], now: Callable[[], int], passed: Callable[[], int]) -> Offset:
    asked, began = now(), passed()
    theirs = ask()
    ended, answered = passed(), now()
    return Offset(theirs - (asked + answered) // 2, ended - began)
