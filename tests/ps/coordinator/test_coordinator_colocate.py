"""A coordinator whose workers bring its shards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal, TypeVar

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ShardControlServicer, add_ShardControlServicer_to_server
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.types import PROTOCOL
from hubring.ps.job.membership import JOIN_SECONDS
from tests.support.fakes.coordinator import CONTEXT, Hub, checkpointed, run, shard_token

T = TypeVar("T")
LEASE = 0.02  # seconds; a Join waits for half of it


class Colocated(Hub):
    """A hub that starts no shards, and workers that do as they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        super().__init__(monkeypatch, **{"colocate": True, "lease": LEASE, **settings})

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


def test_a_job_begins_once_every_worker_has_brought_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch)
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

    run(story())


def test_a_shard_has_its_workers_rank_whichever_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch)
        zero, one = await hub.summoned("a", rank=0), await hub.summoned("b", rank=1)
        assert (await hub.shard("shard of b", one.incarnation)).shard == 1
        assert (await hub.shard("shard of a", zero.incarnation)).shard == 0
        assert [shard.index for shard in hub.fleet.shards] == [0, 1]

    run(story())


def test_the_launcher_may_say_how_many_bring_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, workers=0)
        first = await hub.summoned("a", world_size=3)
        await hub.shard("shard of a", first.incarnation)
        assert "waiting for 2 of 3 workers" in (await hub.join("a", world_size=3, brings_shard=True)).text

    run(story())


def test_before_the_start_a_shard_goes_with_its_worker_and_another_takes_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch)
        gone = await hub.summoned("a")
        await hub.shard("shard of a", gone.incarnation)
        hub.time.advance(JOIN_SECONDS + 1.0)
        await hub.coordinator.tick()
        assert await hub.told_to_stop("shard of a")
        assert "has left" in (await hub.shard("late shard of a", gone.incarnation)).refused
        ready = await hub.brought("b", "c")
        assert [reply.state for reply in ready] == [pb.JoinReply.READY] * 2
        assert [shard.token.rstrip(".") for shard in hub.fleet.shards] == ["shard of b", "shard of c"]
        assert hub.coordinator.job.failure is None

    run(story())


def test_before_the_start_a_silent_shard_is_parted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch)
        first = await hub.summoned("a")
        await hub.shard("shard of a", first.incarnation)
        hub.fleet.shards[0].heard = -1.0
        await hub.coordinator.tick()
        assert hub.fleet.shards == []
        assert hub.coordinator.job.failure is None

    run(story())


def test_a_ring_brings_no_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, workers=1)
        assert (await hub.join("a", topology="ring")).state == pb.JoinReply.READY

    run(story())


def test_shards_that_no_worker_brings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch)
        assert "--colocate" in (await hub.shard("stray")).refused

    run(story())


def test_nobody_joins_a_job_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch)
        first, _ = await hub.brought("a", "b")
        await hub.leave(first)
        late = await hub.join("c")
        assert (late.state, late.exit_code) == (pb.JoinReply.REFUSED, 78)
        assert "no worker can join a job with --colocate" in late.text

    run(story())


def test_a_worker_that_is_done_keeps_its_shard_until_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0)
        first, second = await hub.brought("a", "b")
        assert f"rank {second.rank}" in (await hub.leave(first)).awaits
        assert "checkpoint" in (await hub.leave(second)).awaits, "the coordinator has not looked yet"
        await hub.coordinator.tick()
        assert [(await hub.leave(joined)).awaits for joined in (first, second)] == ["", ""]

    run(story())


def test_whoever_waits_with_its_shard_hears_of_the_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.notifier.PATIENCE", 1000.0)

    async def story() -> None:
        hub = Colocated(monkeypatch, workers=1, lease=1000.0)
        (only,) = await hub.brought("a")
        request = pb.LeaveRequest(rank=only.rank, incarnation=only.incarnation, wait_seconds=1000.0)
        leaving = asyncio.create_task(hub.control.Leave(request, CONTEXT))
        while not hub.coordinator._notifier._changed._waiters:
            await asyncio.sleep(0)
        await hub.coordinator.tick()
        assert (await leaving).awaits == ""

    run(story())


def test_the_next_job_has_new_shards_from_0_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0)
        for joined in await hub.brought("a", "b"):
            await hub.leave(joined)
        await hub.coordinator.tick()
        assert not hub.coordinator.done.is_set()
        assert await hub.told_to_stop("shard of a")
        await hub.brought("c", "d")
        assert [(shard.index, shard.token.rstrip(".")) for shard in hub.fleet.shards] == [
            (0, "shard of c"),
            (1, "shard of d"),
        ]

    run(story())


def test_a_lost_worker_ends_the_job_but_not_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpointed(tmp_path)

    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0, checkpoint_dir=tmp_path)
        first, second = await hub.brought("a", "b")
        hub.time.advance(4.0)
        await hub.beat(first)
        hub.time.advance(2.0)
        await hub.coordinator.tick()
        told = await hub.beat(first)
        assert told.exit_code == 69
        assert told.failed.startswith(f"rank {second.rank} ")
        assert "the job cannot continue without its shard" in told.failed
        assert hub.fleet.failures == [told.failed]
        await hub.leave(first, "FAILED")
        await hub.coordinator.tick()
        assert not hub.coordinator.done.is_set()
        restored = hub.coordinator.agreed_model.restored
        assert restored is not None
        assert restored[1].step == 9

    run(story())


def test_a_worker_tells_of_its_shards_end_and_all_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0)
        first, second = await hub.brought("a", "b")
        told = await hub.beat(second, shard_ended="was killed by signal 9")
        assert f"shard {second.rank} (rank {second.rank}'s, here pid 1) was killed by signal 9" in told.failed
        assert (await hub.beat(first)).failed == told.failed
        assert hub.coordinator.failure is None

    run(story())


def test_a_shard_without_heartbeat_ends_the_job_though_its_worker_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0)
        first, second = await hub.brought("a", "b")
        await hub.leave(first)
        hub.fleet.shards[first.rank].heard = -6.0
        await hub.coordinator.tick()
        assert f"shard {first.rank}" in (await hub.beat(second)).failed
        await hub.leave(second, "FAILED")
        await hub.coordinator.tick()
        assert hub.coordinator.outcome is not None
        assert not hub.coordinator.outcome.ok, "one finished, but the job did not"

    run(story())


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_who_has_lost_a_shard_neither_saves_nor_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Literal["bsp", "asp"]
) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0, checkpoint_dir=tmp_path, mode=mode)
        first, second = await hub.brought("a", "b")
        await hub.plan(first)
        await hub.beat(second, shard_ended="was killed by signal 9")
        for joined in (first, second):
            await hub.leave(joined, "FAILED")
        await hub.coordinator.tick()
        assert hub.coordinator.outcome is not None
        assert hub.coordinator.last_stats == []
        assert hub.fleet.saves.empty()

    run(story())


def test_a_last_checkpoint_is_given_up_when_a_shard_vanishes_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.coordinator.TURN_SECONDS", 0.01)

    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0, checkpoint_dir=tmp_path, once=True)
        first, second = await hub.brought("a", "b")
        await hub.plan(first)
        for joined in (first, second):
            await hub.leave(joined)
        for _ in range(3):  # the shards take their time, and are waited for
            await hub.coordinator.tick()
        assert not hub.fleet.saves.empty()
        assert not hub.coordinator.done.is_set()
        hub.fleet.shards[second.rank].heard = -6.0
        await hub.coordinator.tick()
        assert hub.coordinator.done.is_set()
        assert f"shard {second.rank} " in str(hub.coordinator.job.failure)
        assert list(tmp_path.iterdir()) == []

    run(story())


class Mute(ShardControlServicer):
    """A shard that does as it is told until its host vanishes: calls get there, and no answer comes back."""

    def __init__(self) -> None:
        self.vanished = False

    async def SetView(self, request: pb.View, context: Any) -> pb.Ack:  # noqa: N802
        return await self.answered(pb.Ack())

    async def SetPlan(self, request: pb.ShardAssignment, context: Any) -> pb.Ack:  # noqa: N802
        return await self.answered(pb.Ack())

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.Ack:  # noqa: N802
        return await self.answered(pb.Ack())

    async def Fail(self, request: pb.FailRequest, context: Any) -> pb.Ack:  # noqa: N802
        return await self.answered(pb.Ack())

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.Ack:  # noqa: N802
        return await self.answered(pb.Ack())

    async def Follow(self, request: pb.FollowRequest, context: Any) -> pb.Ack:  # noqa: N802
        return await self.answered(pb.Ack())

    async def Replicate(self, request: pb.ReplicateRequest, context: Any) -> pb.Ack:  # noqa: N802
        return await self.answered(pb.Ack())

    async def Promote(self, request: pb.PromoteRequest, context: Any) -> pb.Ack:  # noqa: N802
        return await self.answered(pb.Ack())

    async def Save(self, request: pb.SaveRequest, context: Any) -> pb.SaveReply:  # noqa: N802
        return await self.answered(pb.SaveReply())

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.ShardStats:  # noqa: N802
        return await self.answered(pb.ShardStats())

    async def answered(self, reply: T) -> T:
        if self.vanished:
            await asyncio.Event().wait()
        return reply


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_nobody_waits_for_a_shard_whose_host_has_vanished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Literal["bsp", "asp"]
) -> None:
    monkeypatch.setattr("tests.support.fakes.coordinator.FakeFleet", Fleet)
    # How long the others may wait until the hub notifies them.
    monkeypatch.setattr("hubring.ps.coordinator.shard_fleet.CALL_SECONDS", 0.05)

    async def story() -> None:
        shard = Mute()
        server = grpc.aio.server()
        add_ShardControlServicer_to_server(shard, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            settings = {"lease": 5.0, "mode": mode, "workers": 1, "once": True, "insecure": True}
            hub = Colocated(monkeypatch, checkpoint_dir=tmp_path, **settings)
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

    run(story())


def test_one_worker_that_is_asked_to_stop_stops_all_after_a_common_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0)
        first, second = await hub.brought("a", "b")
        for _ in range(2):
            await hub.beat(first, stopping=True)
        assert hub.fleet.drains == 1
        for joined in (first, second):
            await hub.leave(joined, "PREEMPTED")
        assert hub.coordinator.job.failure is None
        await hub.coordinator.tick()
        assert not hub.coordinator.done.is_set(), "nobody asked the server to stop"

    run(story())


def test_a_worker_that_does_not_wait_for_the_others_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Colocated(monkeypatch, lease=5.0)
        first, second = await hub.brought("a", "b")
        await hub.leave(first, "PREEMPTED")
        assert (
            "stopped on request; the job cannot continue without its shard" in (await hub.beat(second)).failed
        )

    run(story())
