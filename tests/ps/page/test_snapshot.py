"""Whoever should have been heard of is marked at once, long before its lease is over."""

from __future__ import annotations

import asyncio

import pytest

from hubring.ps.job.joiner import Joiner
from hubring.ps.page.rates import Rates
from hubring.ps.page.renderer import TICK_SECONDS
from hubring.ps.page.snapshot import LATE_SECONDS, Snapshot
from tests.support.fakes.coordinator import Hub, run


def states(hub: Hub) -> list[str]:
    seen = Snapshot.of(hub.coordinator.report([]), Rates(), (), ())
    return [worker.state for worker in seen.workers]


def test_a_worker_is_silent_once_its_heartbeat_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        first, second = await hub.started()
        hub.time.advance(1.0 + LATE_SECONDS)
        assert states(hub) == ["training", "training"]
        await hub.beat(first)
        hub.time.advance(0.1)
        assert states(hub)[second.rank] == "silent"
        assert states(hub)[first.rank] == "training"
        await hub.beat(second)
        assert states(hub) == ["training", "training"]

    run(story())


def test_a_stopped_worker_is_seen_within_two_seconds_of_its_last_heartbeat() -> None:
    heartbeat = 1.0
    assert heartbeat + LATE_SECONDS + TICK_SECONDS < 2.0


@pytest.mark.parametrize(("lease", "heartbeat"), [(2.0, 0.4), (5.0, 1.0), (60.0, 1.0)])
def test_what_is_late_follows_from_how_often_workers_beat(
    monkeypatch: pytest.MonkeyPatch, lease: float, heartbeat: float
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, lease=lease)
        await hub.started()
        hub.time.advance(heartbeat + LATE_SECONDS - 0.01)
        assert states(hub) == ["training", "training"]
        hub.time.advance(0.02)
        assert states(hub) == ["silent", "silent"]

    run(story())


def test_nobody_is_silent_who_waits_for_the_others_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, workers=2, lease=10.0)
        hub.coordinator.job.admit(Joiner("a", "train.py", "hub", "here", 1), hub.time.now())
        hub.time.advance(4.0)
        assert states(hub) == ["joined", "missing"]

    run(story())


def test_a_worker_that_all_wait_for_does_not_count_as_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        first, second = await hub.started()
        await hub.beat(first, step=3, waiting=5.0)
        await hub.beat(second, step=3)
        found = states(hub)
        assert (found[first.rank], found[second.rank]) == ("blocked", "training")

    run(story())


def test_who_is_gone_is_told_with_how(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, workers=3, lease=5.0)
        await hub.shard()
        first, second, third = await asyncio.gather(*map(hub.join, "abc"))
        await hub.leave(first)
        hub.time.advance(3.0)
        await hub.beat(third)
        hub.time.advance(2.5)
        await hub.coordinator.tick()
        found = states(hub)
        assert [found[each.rank] for each in (first, second, third)] == ["finished", "lost", "silent"]

    run(story())


def test_a_shards_heartbeats_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        await hub.started()
        hub.fleet.shards[0].heard = hub.time.now()
        hub.time.advance(3.0)
        rows = (await hub.coordinator.status())["shards"]
        assert [row["seconds_since_heartbeat"] for row in rows] == [3.0]

    run(story())
