"""A closed connection ends a lease early; a heartbeat renews it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.job.membership import RETURN_SECONDS
from tests.support.fakes.coordinator import CONTEXT, Hub, run


async def opened(hub: Hub, request: pb.ConnectRequest) -> None:
    async for _ in hub.control.Connect(request, CONTEXT):
        raise AssertionError("the server stopped")


async def disconnect(hub: Hub, request: pb.ConnectRequest) -> None:
    """Opens a connection and closes it, as the end of a process does."""
    call = asyncio.create_task(opened(hub, request))
    await asyncio.sleep(0)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


def test_a_worker_that_disconnects_is_lost_long_before_its_lease_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, lease=1000.0)
        one, other = await hub.started()
        for worker in (one, other):
            await disconnect(hub, pb.ConnectRequest(rank=worker.rank, incarnation=worker.incarnation))
        await hub.beat(other)
        hub.time.advance(RETURN_SECONDS + 0.1)
        await hub.coordinator.tick()
        assert [member.rank for member in hub.coordinator.job.members] == [other.rank]
        assert list(hub.coordinator.job.outcome.lost) == [one.rank]

    run(story())


def test_a_shard_that_disconnects_ends_the_job_unless_it_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, shards=2, lease=1000.0)
        await hub.shard("s")
        await hub.shard("t")
        await asyncio.gather(hub.join("a"), hub.join("b"))
        for shard in hub.fleet.shards:
            shard.heard = hub.time.now()
            await disconnect(hub, pb.ConnectRequest(shard=shard.token))
        hub.coordinator.beat_shard("s")
        hub.time.advance(RETURN_SECONDS + 0.1)
        assert hub.fleet.silent(hub.time.now()) is hub.fleet.find("t")
        await hub.coordinator.tick()
        assert "shard 1 (here pid 1) sent no heartbeat for 4.1 s" in str(hub.coordinator.job.failure)

    run(story())


def test_a_worker_that_goes_while_it_waits_frees_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.notifier.PATIENCE", 1000.0)

    async def story() -> None:
        hub = Hub(monkeypatch, lease=1000.0)
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

    run(story())
