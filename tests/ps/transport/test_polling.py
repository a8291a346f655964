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


@pytest.mark.parametrize(
    ("gaps", "slept", "looks"),
    [
        pytest.param([0.5] * 4, [1, 1, 1, 1], True, id="after a short wait it stays awake"),
        pytest.param([0.5, 5.0], [1, 2], True, id="it sleeps after its time awake"),
        pytest.param([5.0, 5.0], [1, 2], False, id="after a long wait it sleeps at once"),
    ],
)
def test_a_spin_wait_stays_awake_for_a_while_after_a_short_wait(
    gaps: list[float], slept: list[int], looks: bool
) -> None:
    road = Road([sum(gaps[: number + 1]) * AWAKE_SECONDS for number in range(len(gaps))])
    spin_wait = SpinWait(road.poll, lambda: road.now)
    for count in slept:
        assert spin_wait.wait() == {7: 1}
        assert road.slept == count
    assert (road.looked_on > 0) is looks


def ready(_: float | None) -> list[tuple[int, int]]:
    return [(7, 1)]


def test_a_spin_wait_sleeps_with_the_batch_policy_and_restores_it() -> None:
    policies: list[int] = []

    def poll(timeout: float | None) -> list[tuple[int, int]]:
        policies.append(os.sched_getscheduler(0))
        return ready(timeout)

    SpinWait(poll).wait()
    assert policies == [os.SCHED_BATCH]
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
        SpinWait(ready).wait()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_policy_that_somebody_chose_is_left_alone(meanwhile: bool) -> None:
    def choose() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def poll(timeout: float | None) -> list[tuple[int, int]]:
        if meanwhile:
            choose()
        assert os.sched_getscheduler(0) == os.SCHED_IDLE
        return ready(timeout)

    try:
        if not meanwhile:
            choose()
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
    assert SpinWait(ready).wait() == {7: 1}
