"""Clocks of two hosts are compared by the midpoint of a round trip; pauses and long waits are noticed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hubring.ps.core.errors import DeadlineExceeded
from hubring.ps.core.timing import (
    LATE_WAIT_SECONDS,
    OFFSET_TRIES,
    ClockOffset,
    Pauses,
    Waiting,
    measure_offset,
    wait_message,
)
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.groups import ParameterGroups
from tests.support.fakes.clock import FakeTime
from tests.support.fakes.hub import FakeHub, FakeRank


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


def test_a_wait_that_ends_much_later_than_its_limit_was_paused() -> None:
    time = FakeTime()
    pauses = Pauses(time)
    for seconds, total in (
        (2.0, 0.0),
        (2.0 + LATE_WAIT_SECONDS, 0.0),
        (12.0, 12.0),
        (1.0, 12.0),
        (30.0, 42.0),
    ):
        with pauses.within(2.0):
            time.advance(seconds)
        assert pauses.seconds == total
    pauses.clear()
    assert pauses.seconds == 0.0


def test_a_long_wait_is_told_every_ten_seconds() -> None:
    time = FakeTime()
    waiting = Waiting(time)
    told = []
    with waiting:
        for _ in range(25):
            time.advance(1.0)
            told.append(waiting.due())
    assert [seconds for seconds in told if seconds is not None] == [10.0, 20.0]


def test_short_waits_do_not_add_up() -> None:
    time = FakeTime()
    waiting = Waiting(time)
    for _ in range(5):
        with waiting:
            time.advance(9.0)
            assert (waiting.seconds, waiting.due()) == (9.0, None)
        assert (waiting.seconds, waiting.due()) == (0.0, None)


def test_another_threads_wait_does_not_end_or_restart_this_one() -> None:
    time = FakeTime()
    waiting = Waiting(time)
    with waiting, ThreadPoolExecutor(1) as other:
        time.advance(5.0)
        other.submit(waiting.__enter__).result()
        assert waiting.seconds == 5.0
        time.advance(1.0)
        other.submit(waiting.__exit__, None, None, None).result()
        assert waiting.seconds == 6.0
        with waiting:
            assert waiting.seconds == 6.0
        time.advance(5.0)
        assert waiting.due() == 11.0
    assert waiting.seconds == 0.0


def test_a_wait_that_takes_too_long_names_the_flag_and_the_slowest_worker() -> None:
    never = Work("the exchange of bucket 0")
    text = "bucket 0 did not finish within 0 s; raise --timeout, or timeout=... .* may take this long"

    def wait(slowest: str) -> None:
        waiting = Waiting()
        with waiting, waiting:  # a collective in an exchange
            waiting.slowest = slowest  # as the heartbeat's reply says
            never.wait(0.0)

    with pytest.raises(DeadlineExceeded, match=rf"{text}\. The slowest is rank 1 \(here pid 1\) at step 7$"):
        wait("rank 1 (here pid 1) at step 7")
    with pytest.raises(DeadlineExceeded, match=f"{text}$"):
        wait("")


def test_the_sentence_names_who_is_waited_for() -> None:
    told = wait_message(10.2, 120, "rank 2 (node7 pid 41) at step 119")
    assert told.startswith(
        "waiting for 10 s at step 120: the slowest is rank 2 (node7 pid 41) at step 119. It computes"
    )
    assert "no other worker is behind. Check that all ranks call the same" in wait_message(10.0, 120, "")


def test_a_step_that_waits_for_several_buckets_is_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Work):
        """Takes three seconds, and sees how long its waiter is known to wait."""

        def wait(self, timeout: float | None = None) -> None:
            time.advance(3.0)
            seen.append(waiting.seconds)

    time, seen, rank = FakeTime(), list[float](), FakeRank(FakeHub(1))
    rank.waiting = waiting = Waiting(time)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buckets = make_buckets(optimizer, model.named_parameters(), rank.allocate, 1024, "SGD")
    exchange = Exchange(rank, ParameterGroups(optimizer), None)
    monkeypatch.setattr(rank, "push_pull", lambda bucket, hyper: Slow("something slow"))
    exchange.add(buckets, 0)
    exchange.finish()
    assert seen == [3.0, 6.0]
    assert waiting.seconds == 0.0
