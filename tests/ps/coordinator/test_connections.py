"""A closed connection ends a lease early; a heartbeat renews it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.core.types import incarnation_to_wire
from hubring.ps.job.membership import RETURN_SECONDS
from tests.support.fakes.coordinator import Hub, Refused, disconnect, opened, shard_token


async def test_a_shard_that_disconnects_ends_the_job_unless_it_is_heard_of() -> None:
    hub = Hub(shards=2, lease=1000.0)
    await hub.shard("s")
    await hub.shard("t")
    await asyncio.gather(hub.join("a"), hub.join("b"))
    for shard in hub.fleet.shards:
        shard.heard = hub.time.now()
        await disconnect(hub, pb.ConnectRequest(shard=shard.token))
    hub.coordinator.beat_shard(shard_token("s"))
    hub.time.advance(RETURN_SECONDS + 0.1)
    assert hub.fleet.silent(hub.time.now()) == [hub.fleet.find(shard_token("t"))]
    await hub.coordinator.tick()
    assert "shard 1 (here pid 1) sent no heartbeat for 4.1 s" in str(hub.coordinator.job.failure)


async def test_strangers_cannot_hold_a_connection() -> None:
    hub = Hub()
    with pytest.raises(Refused, match=r"rank 0 \(join 0\) is not a member of the job"):
        await opened(hub, pb.ConnectRequest(rank=0, incarnation=incarnation_to_wire(1)))
    one, _ = await hub.started()
    with pytest.raises(Refused, match="restart the worker to rejoin"):
        await opened(hub, pb.ConnectRequest(rank=one.rank, incarnation=one.incarnation[::-1]))
    with pytest.raises(Refused, match="this shard is not registered"):
        await opened(hub, pb.ConnectRequest(shard="other"))


@pytest.mark.parametrize("shard", ["", "s"])
async def test_only_the_end_of_the_newest_connection_counts(shard: str) -> None:
    def lost(hub: Hub) -> int:
        now = hub.time.now()
        return len(hub.coordinator.job.expire(now)) + bool(hub.fleet.silent(now))

    hub = Hub(lease=1000.0)
    one, other = await hub.started()
    await hub.beat(other)
    request = pb.ConnectRequest(
        rank=one.rank, incarnation=one.incarnation, shard=shard_token(shard) if shard else ""
    )
    older = asyncio.create_task(opened(hub, request))
    await asyncio.sleep(0)
    newer = asyncio.create_task(opened(hub, request))
    assert await older == 1, "the older one ends by itself"
    hub.time.advance(RETURN_SECONDS + 0.1)
    assert lost(hub) == 0
    newer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await newer
    hub.time.advance(RETURN_SECONDS + 0.1)
    assert lost(hub) == 1


async def test_a_worker_that_goes_while_it_waits_frees_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.joining.PATIENCE", 1000.0)

    hub = Hub(lease=1000.0)
    await hub.shard()
    waiting = asyncio.ensure_future(hub.join("a", rank=0))
    while not hub.coordinator.job.members:
        await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    hub.time.advance(RETURN_SECONDS + 0.1)
    await hub.coordinator.tick()
    assert not hub.coordinator.job.members
