"""A closed connection ends a lease early; a heartbeat renews it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from hubring.ps.job.membership import RETURN_SECONDS
from tests.support.fakes.coordinator import Hub, disconnect, in_training, opened, shard_token, worker_token


async def test_a_shard_that_disconnects_ends_the_job_unless_it_is_heard_of() -> None:
    hub = Hub(shards=2, lease=1000.0)
    await hub.shard("s")
    await hub.shard("t")
    await asyncio.gather(hub.join("a"), hub.join("b"))
    for shard in hub.fleet.shards:
        shard.heard = hub.time.now()
        await disconnect(hub, shard.token)
    hub.coordinator.beat_shard(shard_token("s"))
    hub.time.advance(RETURN_SECONDS + 0.1)
    assert hub.fleet.silent(hub.time.now()) == [hub.fleet.find(shard_token("t"))]
    await hub.coordinator.tick()
    assert "shard 1 (here pid 1) sent no heartbeat for 4.1 s" in str(hub.coordinator.job.failure)


async def test_a_token_that_no_process_can_have_holds_no_connection() -> None:
    assert await asyncio.wait_for(opened(Hub(), "t"), 10.0) == 1


@pytest.mark.parametrize("token", [worker_token("a"), shard_token("s")])
async def test_only_the_end_of_the_newest_connection_counts(token: str) -> None:
    def lost(hub: Hub) -> int:
        now = hub.time.now()
        return len(hub.coordinator.job.expire(now)) + bool(hub.fleet.silent(now))

    hub, *_ = await in_training(lease=1000.0)
    older = asyncio.create_task(opened(hub, token))
    await asyncio.sleep(0)
    newer = asyncio.create_task(opened(hub, token))
    assert await older == 1, "the older one ends by itself"
    hub.time.advance(RETURN_SECONDS + 0.1)
    assert lost(hub) == 0
    newer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await newer
    hub.time.advance(RETURN_SECONDS + 0.1)
    assert lost(hub) == 1


async def test_a_process_that_joins_as_its_connection_ends_has_only_seconds() -> None:
    """Its call to join may be served after the end of its connection, and so may a heartbeat."""
    hub = Hub(lease=1000.0, shards=1)
    hub.connects = False
    await hub.shard()
    joined = await hub.join("a")
    hub.fleet.shards[0].heard = hub.time.now()
    await hub.beat(joined)
    await hub.tick_after(RETURN_SECONDS + 0.1)
    assert not hub.coordinator.job.members
    assert hub.fleet.silent(hub.time.now()) == hub.fleet.shards


@pytest.mark.usefixtures("impatient")
async def test_a_job_does_not_begin_with_a_worker_whose_connection_closed() -> None:
    hub = Hub(workers=3, lease=1000.0)
    await hub.shard()
    for name in "ab":
        await hub.join(name)
    await disconnect(hub, worker_token("a"))
    await hub.join("c")
    assert len(hub.coordinator.job.members) == 3
    assert not hub.coordinator.job.started
    await hub.tick_after(RETURN_SECONDS + 0.1)
    assert (await hub.join("d")).rank == 0
    assert hub.coordinator.job.started
