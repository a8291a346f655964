from __future__ import annotations

import asyncio

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.shard_sources import OwnShards, WorkersShards
from hubring.ps.core.errors import ConfigError
from hubring.ps.job.job import Job
from hubring.ps.job.joiner import Joiner
from tests.support.fakes.coordinator import CONTEXT, LIMIT, Hub, run, shard_token


def job(workers: int = 2) -> Job:
    return Job(workers=workers, lease_seconds=5.0, keep_going=True, colocate=True)


def test_the_servers_shards_are_as_many_as_it_was_told_and_numbered_as_they_come() -> None:
    sources = OwnShards(3)
    assert sources.wanted(job()) == 3
    assert sources.number(0, job(), []) == 0
    assert sources.orphans(job(), [], 0.0) == []


def test_a_shard_that_nobody_brought_has_no_place_among_the_workers() -> None:
    with pytest.raises(ConfigError, match="its workers start all shards"):
        WorkersShards().number(0, job(), [])


def test_a_workers_shard_has_its_rank() -> None:
    colocated = job()
    member = colocated.admit(Joiner("a", "train.py", "hub", "here", 1, rank=1), 0.0)
    assert WorkersShards().wanted(colocated) == 2
    assert WorkersShards().number(member.incarnation, colocated, []) == 1


def test_a_job_begins_once_other_hosts_have_brought_the_shards_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, workers=1, shards=0, await_shards=2, lease=0.02)
        alone = await hub.join("a")
        told = (alone.state, alone.text)
        restart = "restart the server with a smaller --await-shards"
        where = "(2 from other hosts: ps-server start --join ADDR)"
        assert told == (pb.JoinReply.WAITING, f"waiting for 2 of 2 shards {where}. Start them, or {restart}")
        await hub.shard("first")
        assert "waiting for 1 of 2 shards" in (await hub.join("a")).text
        await hub.shard("second")
        ready = await hub.join("a")
        assert (ready.state, len(ready.shards)) == (pb.JoinReply.READY, 2)

    run(story())


def test_a_job_waits_for_its_own_hosts_shards_and_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, workers=1, shards=1, await_shards=1, lease=0.02)
        await hub.shard("own")
        assert "waiting for 1 of 2 shards" in (await hub.join("a")).text

    run(story())


def test_a_ring_waits_for_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, workers=1, shards=0, await_shards=2)
        assert (await hub.join("a", topology="ring")).state == pb.JoinReply.READY

    run(story())


async def told_to_stop(hub: Hub, token: str) -> bool:
    return (
        await hub.control.ShardHeartbeat(pb.ShardHeartbeatRequest(token=shard_token(token)), CONTEXT)
    ).stop


def test_the_server_stays_until_every_guest_has_heard_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, shards=0, await_shards=2)
        for token in ("first", "second"):
            await hub.shard(token)
            assert not await told_to_stop(hub, token)
        hub.coordinator.done.set()
        leaving = asyncio.create_task(hub.coordinator.see_off(hub.fleet.shards, 100 * LIMIT))
        assert await told_to_stop(hub, "first")
        await asyncio.sleep(0)
        assert not leaving.done()
        assert await told_to_stop(hub, "second")
        await leaving

    run(story())


def test_the_server_does_not_stay_for_a_guest_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, shards=0, await_shards=1, lease=5.0)
        await hub.shard("gone")
        hub.fleet.shards[0].heard = -6.0
        await hub.coordinator.see_off(hub.fleet.shards, 100 * LIMIT)

    run(story())


def test_the_server_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, shards=0, await_shards=1)
        await hub.shard("mute")
        await hub.coordinator.see_off(hub.fleet.shards, 0.0)

    run(story())
