"""Clocks of two hosts are compared by the midpoint of a round trip."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hubring.ps.core.timing import OFFSET_TRIES, ClockOffset, measure_offset


class Elsewhere:
    """A host whose clock is ahead by so many nanoseconds; its ways there and back take turns.

    Attributes:
        now: Our clock.
    """

    def __init__(self, ahead: int, ways: Sequence[tuple[int, int]]) -> None:
        self.now = 1_000_000
        self._ahead = ahead
        self._ways = list(ways)
        self.asked = 0

    def ask(self) -> int:
        there, back = self._ways[self.asked % len(self._ways)]
        self.asked += 1
        theirs = self.now + there + self._ahead
        self.now += there + back
        return theirs


@pytest.mark.parametrize("ahead", [5_000_000, 0, -7_000_000])
def test_ways_of_equal_length_tell_the_offset_exactly(ahead: int) -> None:
    other = Elsewhere(ahead, [(300, 300)])
    assert measure_offset(other.ask, lambda: other.now, lambda: other.now) == ClockOffset(ahead, 600)


def test_the_shortest_round_trip_counts() -> None:
    other = Elsewhere(10_000, [(900, 100), (50, 70), (4000, 0)])
    assert measure_offset(other.ask, lambda: other.now, lambda: other.now) == ClockOffset(9_990, 120)
    assert other.asked == OFFSET_TRIES


def test_a_clock_that_is_set_back_meanwhile_does_not_win() -> None:
    other = Elsewhere(0, [(900, 100), (50, 70)])
    back = 1_000_000_000

    def now() -> int:
        """Is set back during the first try."""
        return other.now - back * (other.asked > 0)

    assert measure_offset(other.ask, now, lambda: other.now) == ClockOffset(back - 10, 120)


def test_a_pause_between_the_two_clocks_counts_as_round_trip() -> None:
    other, pauses = Elsewhere(2_000, [(50, 50)]), 0

    def now() -> int:
        nonlocal pauses
        pauses += 1
        read = other.now
        other.now += 5_000 * (pauses % 2)  # before the request, as on a busy machine
        return read

    found = measure_offset(other.ask, now, lambda: other.now)
    assert abs(found.ahead - 2_000) <= found.round_trip / 2
