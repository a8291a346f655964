"""Signals that come at any moment cost a client's lines nothing."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest

from hubring.ps.core.errors import HubringError
from hubring.ps.transport.polling import SpinWait
from tests.support.fakes.scripted_shards import SOON, AnnouncedWait, ScriptedShards, opened

shards = pytest.fixture(opened, name="shards")


class Alarm(Exception):
    """What a signal raises."""


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """Gets the number of each SIGALRM, which also raises.

    A finalizer swallows what a signal raises in it, so none of earlier tests' runs meanwhile. And the timer
    is the one that bounds the test: a loop until an alarm has to look here for one that was swallowed.
    """
    came: list[int] = []

    def ring(number: int, frame: object) -> None:
        came.append(number)
        raise Alarm

    gc.disable()
    before, limit = signal.signal(signal.SIGALRM, ring), signal.getitimer(signal.ITIMER_REAL)
    yield came
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *limit)
    gc.enable()


def ask_until_the_alarm(shards: ScriptedShards, microseconds: int, alarms: list[int]) -> None:
    alarms.clear()
    signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
    while not alarms:
        with shards.connections.batched():
            shards.ask(0)


class InterruptedBatches(WeakSet[Any]):
    """A signal raises as soon as something is in here."""

    def add(self, item: object) -> None:
        super().add(item)
        raise Alarm


def test_a_signal_that_comes_inside_a_batch_ends_it_before_anybody_hears_of_it(
    shards: ScriptedShards,
) -> None:
    shards.connections._batches = InterruptedBatches()
    try:
        with shards.connections.batched():
            raise AssertionError
    except Alarm:
        assert not shards.connections._batches, "what is asked for here leaves"


def test_signals_that_raise_at_any_moment_leave_nothing_taken(
    shards: ScriptedShards, alarms: list[int]
) -> None:
    lines = shards.connections
    for turn in range(500):
        with pytest.raises(Alarm):
            ask_until_the_alarm(shards, 20 + turn % 50, alarms)
        assert not lines._batches
        assert lines._io_lock.acquire(timeout=SOON)
        lines._io_lock.release()
        lines._requests.failure = None  # set if the alarm came while something was sent
        lines._process({})
        assert lines._requests._windows[0].waiting == [], "what was asked for leaves"


def test_a_request_whose_submission_is_interrupted_leaves_with_the_next(
    shards: ScriptedShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = shards.connections._requests._windows[0]
    put = window.put

    def interrupt(*request: Any) -> None:
        put(*request)
        raise Alarm

    with monkeypatch.context() as patch:
        patch.setattr(window, "put", interrupt)
        with pytest.raises(Alarm):
            shards.ask(0)
    work = shards.ask(1)
    assert len(shards.wire.sent) == 2
    shards.wire.answer(0, 1)
    work.wait(SOON)


def test_an_exception_that_interrupts_a_wait_closes_the_connections(shards: ScriptedShards) -> None:
    """A signal's exception may have cost a reply: who asks again is told so, and does not wait for it."""

    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    shards.wire.before_receive = interrupt
    work = shards.ask(1)
    timer = threading.Timer(0.1, shards.wire.answer, (1,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait(SOON)
    with pytest.raises(HubringError, match="KeyboardInterrupt interrupted sending"):
        shards.ask(2).wait(SOON)
    timer.join()


def test_a_signal_s_exception_in_a_wait_is_its_own_and_costs_nothing(
    shards: ScriptedShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = shards.ask(1)

    def alarm(self: SpinWait, timeout: float | None = None) -> dict[int, int]:
        raise TimeoutError("the script's own alarm")

    with monkeypatch.context() as patch:
        patch.setattr(AnnouncedWait, "wait", alarm)
        with pytest.raises(TimeoutError, match="alarm"):
            work.wait(SOON)
    shards.wire.answer(1)
    work.wait(SOON)
