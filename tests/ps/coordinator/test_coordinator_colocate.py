"""A coordinator whose workers bring its shards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.types import PROTOCOL
from hubring.ps.job.membership import JOIN_SECONDS
from tests.support.fakes.coordinator import CONTEXT, Hub, shard_token

SHARD_CONTROL = pb.DESCRIPTOR.services_by_name["ShardControl"]
LEASE = 0.02  # seconds; a Join waits for half of it


class Colocated(Hub):
    """A hub that starts no shards, and workers that do as they are told."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"colocate": True, "lease": LEASE, **settings})

    async def summoned(self, token: str, **changes: Any) -> pb.JoinReply:
        """A worker's first answer: it is to bring a shard."""
        reply = await self.join(token, **changes)
        assert reply.state == pb.JoinReply.BRING_SHARD
        return reply

    async def brought(self, *tokens: str) -> list[pb.JoinReply]:
        """All workers bring their shards and take their places."""
        for token in tokens:
            await self.shard(f"shard of {token}", (await self.summoned(token)).incarnation)
        return list(await asyncio.gather(*(self.join(token, brings_shard=True) for token in tokens)))

    async def told_to_stop(self, token: str) -> bool:
        return (
            await self.control.ShardHeartbeat(pb.ShardHeartbeatRequest(token=shard_token(token)), CONTEXT)
        ).stop


async def test_a_job_begins_once_every_worker_has_brought_its_shard() -> None:
    hub = Colocated()
    first = await hub.summoned("a")
    await hub.shard("shard of a", first.incarnation)
    alone = await hub.join("a", brings_shard=True)
    assert (alone.state, alone.text) == (
        pb.JoinReply.WAITING,
        "waiting for 1 of 2 workers (rank 1 not started yet). Start them, or restart the server with a"
        " smaller --workers",
    )
    second = await hub.summoned("b")
    early = await hub.join("b", brings_shard=True)
    assert (early.state, early.text) == (pb.JoinReply.WAITING, "starting 1 of 2 shards")
    await hub.shard("shard of b", second.incarnation)
    ready = await hub.join("b", brings_shard=True)
    assert (ready.state, len(ready.shards)) == (pb.JoinReply.READY, 2)


async def test_a_shard_has_its_workers_rank_whichever_came_first() -> None:
    hub = Colocated()
    zero, one = await hub.summoned("a", rank=0), await hub.summoned("b", rank=1)
    assert (await hub.shard("shard of b", one.incarnation)).shard == 1
    assert (await hub.shard("shard of a", zero.incarnation)).shard == 0
    assert [shard.index for shard in hub.fleet.shards] == [0, 1]


async def test_the_launcher_may_say_how_many_bring_a_shard() -> None:
    hub = Colocated(workers=0)
    first = await hub.summoned("a", world_size=3)
    await hub.shard("shard of a", first.incarnation)
    text = (await hub.join("a", world_size=3, brings_shard=True)).text
    assert text == "waiting for 2 of 3 workers (ranks 1, 2 not started yet)", "a launcher starts them"


async def test_before_the_start_a_shard_goes_with_its_worker_and_another_takes_its_number() -> None:
    hub = Colocated()
    gone = await hub.summoned("a")
    await hub.shard("shard of a", gone.incarnation)
    await hub.tick_after(JOIN_SECONDS + 1.0)
    assert await hub.told_to_stop("shard of a")
    assert "has left" in (await hub.shard("late shard of a", gone.incarnation)).refused
    ready = await hub.brought("b", "c")
    assert [reply.state for reply in ready] == [pb.JoinReply.READY] * 2
    assert [shard.token.rstrip(".") for shard in hub.fleet.shards] == ["shard of b", "shard of c"]
    assert hub.coordinator.job.failure is None


async def test_before_the_start_a_silent_shard_is_parted_with() -> None:
    hub = Colocated()
    first = await hub.summoned("a")
    await hub.shard("shard of a", first.incarnation)
    hub.fleet.shards[0].heard = -1.0
    await hub.coordinator.tick()
    assert hub.fleet.shards == []
    assert hub.coordinator.job.failure is None


async def test_shards_that_no_worker_brings_are_refused() -> None:
    hub = Colocated()
    assert "--colocate" in (await hub.shard("stray")).refused


async def test_no_worker_joins_a_colocated_job_that_has_started() -> None:
    hub = Colocated()
    first, _ = await hub.brought("a", "b")
    await hub.leave(first)
    late = await hub.join("c")
    assert (late.state, late.exit_code) == (pb.JoinReply.REFUSED, 78)
    assert "no worker can join a job with --colocate" in late.text


async def test_a_worker_waiting_with_its_shard_is_notified_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.joining.PATIENCE", 1000.0)

    hub = Colocated(workers=1, lease=1000.0)
    (only,) = await hub.brought("a")
    request = pb.LeaveRequest(rank=only.rank, incarnation=only.incarnation, wait_seconds=1000.0)
    leaving = asyncio.create_task(hub.control.Leave(request, CONTEXT))
    while not hub.coordinator._notifier._changed._waiters:
        await asyncio.sleep(0)
    await hub.coordinator.tick()
    assert (await leaving).awaits == ""


@pytest.mark.parametrize("further", [False, True])
async def test_a_shard_without_heartbeat_ends_the_job_if_its_worker_is_done_and_others_step_on(
    further: bool,
) -> None:
    hub = Colocated(lease=5.0)
    first, second = await hub.brought("a", "b")
    await hub.leave(first)
    await hub.beat(second, step=int(further))
    hub.fleet.shards[first.rank].heard = -6.0
    await hub.coordinator.tick()
    assert (f"shard {first.rank}" in (await hub.beat(second)).failed) == further
    await hub.leave(second, "FAILED")
    await hub.coordinator.tick()
    assert hub.coordinator.outcome is not None
    assert hub.coordinator.outcome.ok != further, "one finished, but the job did not"


@pytest.mark.parametrize("mode", ["bsp", "asp"])
async def test_a_job_that_lost_a_shard_saves_no_checkpoint_and_reports_no_stats(
    tmp_path: Path, mode: Literal["bsp", "asp"]
) -> None:
    hub = Colocated(lease=5.0, checkpoint_dir=tmp_path, mode=mode)
    first, second = await hub.brought("a", "b")
    await hub.plan(first)
    await hub.beat(second, shard_ended="was killed by signal 9")
    for joined in (first, second):
        await hub.leave(joined, "FAILED")
    await hub.coordinator.tick()
    assert hub.coordinator.outcome is not None
    assert hub.coordinator.last_stats == []
    assert hub.fleet.saves.empty()


async def test_a_last_checkpoint_is_given_up_when_a_shard_vanishes_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.coordinator.TURN_SECONDS", 0.01)

    hub = Colocated(lease=5.0, checkpoint_dir=tmp_path, once=True)
    first, second = await hub.brought("a", "b")
    await hub.plan(first)
    for joined in (first, second):
        await hub.leave(joined)
    for _ in range(3):  # the shards take their time, and are waited for
        await hub.coordinator.tick()
    assert not hub.fleet.saves.empty()
    assert not hub.coordinator.done.is_set()
    hub.fleet.shards[second.rank].heard = -6.0
    while not hub.coordinator.done.is_set():  # a tick waits only TURN_SECONDS for the end
        await hub.coordinator.tick()
    assert f"shard {second.rank} " in str(hub.coordinator.job.failure)
    assert list(tmp_path.iterdir()) == []


class Mute:
    """A shard that does as it is told until its host vanishes: calls get there, and no answer comes back."""

    def __init__(self) -> None:
        self.vanished = False

    def add_to(self, server: grpc.aio.Server) -> None:
        handler: Any = grpc.unary_unary_rpc_method_handler(self._answer)
        methods = {method.name: handler for method in SHARD_CONTROL.methods}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SHARD_CONTROL.full_name, methods),)
        )

    async def _answer(self, request: bytes, context: object) -> bytes:
        """Returns a message without fields, which is one of each type."""
        if self.vanished:
            await asyncio.Event().wait()
        return b""


@pytest.mark.parametrize("mode", ["bsp", "asp"])
async def test_no_worker_waits_for_a_shard_whose_host_disappeared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Literal["bsp", "asp"]
) -> None:
    # How long the others may wait until the hub notifies them.
    monkeypatch.setattr("hubring.ps.coordinator.shard_fleet.CALL_SECONDS", 0.05)

    shard = Mute()
    server = grpc.aio.server()
    shard.add_to(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        settings = {"lease": 5.0, "mode": mode, "workers": 1, "once": True, "insecure": True}
        hub = Colocated(fleet=Fleet(5.0), checkpoint_dir=tmp_path, **settings)
        worker = (await hub.summoned("a")).incarnation
        offer = pb.RegisterShardRequest(
            protocol=PROTOCOL, token=shard_token("s"), worker=worker, addresses={"grpc": address}
        )
        await hub.control.RegisterShard(offer, CONTEXT)
        joined = await hub.join("a", brings_shard=True)
        assert joined.state == pb.JoinReply.READY
        await hub.plan(joined)
        shard.vanished = True
        hub.time.advance(6.0)
        while not hub.coordinator.done.is_set():
            await hub.coordinator.tick()
        assert hub.coordinator.outcome is not None
        assert not hub.coordinator.outcome.ok
    finally:
        await server.stop(None)
