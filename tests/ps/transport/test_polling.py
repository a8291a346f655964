"""Whoever is woken soon is awake; whoever waits for long is asleep, as a batch process."""

from __future__ import annotations

import os

import pytest

from hubring.ps.transport.polling import AWAKE_SECONDS, SpinWait


class Road:
    """A poller and a clock: what is awaited comes at given times; each look takes a while."""

    LOOK = AWAKE_SECONDS / 10

    def __init__(self, arrivals: list[float]) -> None:
        self.now = 0.0
        self.slept = 0
        self.looked_on = 0
        self._arrivals = arrivals

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        self.now += self.LOOK
        self.looked_on += timeout == 0
        if self._arrivals[0] > self.now:
            if timeout == 0:
                return []
            self.slept += 1
            self.now = self._arrivals[0]
        self._arrivals.pop(0)
        return [(7, 1)]


def watch(gaps: list[float]) -> list[int]:
    """How often it had slept after each arrival."""
    times = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    road = Road(times)
    spin_wait = SpinWait(road.poll, lambda: road.now)
    slept = []
    for _ in gaps:
        assert spin_wait.wait() == {7: 1}
        slept.append(road.slept)
    return slept


def test_after_a_short_wait_it_stays_awake() -> None:
    assert watch([AWAKE_SECONDS / 2] * 4) == [1, 1, 1, 1]


def test_a_spin_wait_sleeps_after_its_time_awake() -> None:
    assert watch([AWAKE_SECONDS / 2, 5 * AWAKE_SECONDS]) == [1, 2]


def test_after_a_long_wait_it_sleeps_at_once() -> None:
    road = Road([5 * AWAKE_SECONDS, 10 * AWAKE_SECONDS])
    spin_wait = SpinWait(road.poll, lambda: road.now)
    spin_wait.wait()
    spin_wait.wait()
    assert (road.slept, road.looked_on) == (2, 0)


class Bed:
    """A poller that notes as what it is slept in."""

    def __init__(self) -> None:
        self.policies: list[int] = []

    def poll(self, _: float | None) -> list[tuple[int, int]]:
        self.policies.append(os.sched_getscheduler(0))
        return [(7, 1)]


def test_a_spin_wait_sleeps_with_the_batch_policy_and_restores_it() -> None:
    bed = Bed()
    SpinWait(bed.poll).wait()
    assert bed.policies == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_spin_wait_restores_the_policy_after_an_exception_as_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = os.sched_setscheduler

    def interrupted(thread: int, policy: int, param: os.sched_param) -> None:
        change(thread, policy, param)
        if policy == os.SCHED_BATCH:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_setscheduler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SpinWait(Bed().poll).wait()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_is_left_alone() -> None:
    bed = Bed()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        SpinWait(bed.poll).wait()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert bed.policies == [os.SCHED_BATCH]


def test_a_policy_that_somebody_chose_meanwhile_is_left_alone() -> None:
    def poll(_: float | None) -> list[tuple[int, int]]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return [(7, 1)]

    try:
        SpinWait(poll).wait()
        assert os.sched_getscheduler(0) == os.SCHED_IDLE
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.mark.parametrize(
    ("call", "allowed"),
    [("sched_getscheduler", []), ("sched_getscheduler", [os.SCHED_OTHER]), ("sched_setscheduler", [])],
)
def test_where_it_is_forbidden_it_sleeps_as_it_is(
    monkeypatch: pytest.MonkeyPatch, call: str, allowed: list[int]
) -> None:
    answers = iter(allowed)

    def answer(*_: object) -> int:
        for one in answers:
            return one
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(os, call, answer)
    assert SpinWait(lambda _: [(7, 1)]).wait() == {7: 1}
