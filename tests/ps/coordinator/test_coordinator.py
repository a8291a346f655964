from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint import manifest
from hubring.ps.checkpoint.manifest import Manifest
from hubring.ps.config.server import ServerConfig
from hubring.ps.coordinator.control import Control
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.fleet import Fleet, Shard
from hubring.ps.core.errors import HubringError, JobFailed
from hubring.ps.core.types import PROTOCOL, BucketSpec, ShardPlan, Slice, TensorSpec, View
from hubring.ps.store.consistency import by_name
from tests.support.fake_time import FakeTime

LIMIT = 20.0
"""Seconds after which a call that waits has found a bug."""

T = TypeVar("T")

BUCKET = BucketSpec(0, "float32", 0, "SGD", (TensorSpec("weight", (4,)),))


class FakeFleet(Fleet):
    """Shards that do as they are told, and remember it."""

    def __init__(self, lease_seconds: float) -> None:
        super().__init__(lease_seconds)
        self.views: list[View] = []
        self.plans: list[list[int]] = []
        self.failures: list[str] = []
        self.saves: asyncio.Queue[int] = asyncio.Queue()
        self.may_save = asyncio.Event()
        self.may_plan = asyncio.Event()
        self.may_plan.set()
        self.planning = 0
        self.drains = 0
        self.silent_ones = False
        self.versions: Counter[int] = Counter()
        """How far each shard's keys have come."""

    def register(self, request: pb.RegisterShardRequest, index: int, now: float) -> Shard:
        none: Any = None
        shard = Shard(index, request.token, "here", 1, "host", {}, none, none, float("inf"), request.worker)
        self.shards = sorted([*self.shards, shard], key=lambda each: each.index)
        return shard

    async def dismiss(self, shards: Sequence[Shard]) -> None:
        self.shards = [shard for shard in self.shards if shard not in shards]

    async def set_view(self, view: View) -> None:
        if self.shards:
            self.views.append(view)

    async def set_plan(self, buckets: Sequence[BucketSpec], plan: ShardPlan, restore: Path | None) -> None:
        self.planning += 1
        assert self.planning == 1, "one plan at a time"
        await self.may_plan.wait()
        self.planning -= 1
        self.plans.append([piece.numel for piece in plan.slices])

    async def drain(self) -> None:
        self.drains += 1

    async def fail(self, error: HubringError) -> None:
        self.failures.append(str(error))

    async def reset(self) -> None:
        """There is nothing to forget."""

    async def save(self, folder: Path, step: int) -> list[pb.SaveReply]:
        self.saves.put_nowait(step)
        await self.may_save.wait()
        path = folder / "shard-0.safetensors"
        path.write_bytes(b"tensors")
        return [pb.SaveReply(file=path.name, sha256=manifest.digest(path), bytes=7, keys=[0])]

    async def stats(self) -> list[pb.ShardStats]:
        if self.silent_ones:
            raise JobFailed("shard 0 does not answer")
        return [
            pb.ShardStats(
                shard=each.index, oldest=self.versions[each.index], newest=self.versions[each.index]
            )
            for each in self.shards
        ]

    async def look(self, patience: float) -> list[str]:
        return [f"{shard} does not answer" if self.silent_ones else "" for shard in self.shards]


class Refused(Exception):
    """What `abort` raises."""


class FakeContext:
    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Refused(text)


CONTEXT: Any = FakeContext()


class Hub:
    """A coordinator, the clock that it looks at, and the fleet that it leads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr("hubring.ps.coordinator.coordinator.Fleet", FakeFleet)
        self.time = FakeTime()
        config = ServerConfig(**{"workers": 2, "slice_bytes": 64, **settings})
        restored = manifest.newest(config.checkpoint_dir) if config.checkpoint_dir else None
        consistency = by_name(config.mode, config.staleness, config.backup)
        self.coordinator = Coordinator(config, consistency, self.time, restored)
        self.control = Control(self.coordinator)
        fleet = self.coordinator.fleet
        assert isinstance(fleet, FakeFleet)
        self.fleet = fleet

    async def shard(self, token: str = "s", worker: int = 0) -> pb.RegisterShardReply:
        return await self.control.RegisterShard(
            pb.RegisterShardRequest(protocol=PROTOCOL, token=token, worker=worker), CONTEXT
        )

    async def join(self, token: str, **changes: Any) -> pb.JoinReply:
        request = {"job": "train.py", "topology": "hub", "rank": -1, **changes}
        return await self.control.Join(pb.JoinRequest(protocol=PROTOCOL, token=token, **request), CONTEXT)

    async def plan(
        self, joined: pb.JoinReply, bucket: BucketSpec = BUCKET, slice_bytes: int = 0, **changes: Any
    ) -> pb.PlanReply:
        tensors = [pb.TensorSpec(name=tensor.name, shape=tensor.shape) for tensor in bucket.tensors]
        spec = pb.BucketSpec(dtype=bucket.dtype, optimizer=bucket.optimizer, tensors=tensors)
        return await self.control.Plan(
            pb.PlanRequest(
                rank=joined.rank,
                incarnation=joined.incarnation,
                buckets=[spec],
                slice_bytes=slice_bytes,
                **changes,
            ),
            CONTEXT,
        )

    async def beat(self, joined: pb.JoinReply, **changes: Any) -> pb.HeartbeatReply:
        request = pb.HeartbeatRequest(rank=joined.rank, incarnation=joined.incarnation, **changes)
        return await self.control.Heartbeat(request, CONTEXT)

    async def leave(self, joined: pb.JoinReply, reason: str = "FINISHED") -> pb.LeaveReply:
        number = pb.LeaveRequest.Reason.Value(reason)
        request = pb.LeaveRequest(rank=joined.rank, incarnation=joined.incarnation, reason=number)
        return await self.control.Leave(request, CONTEXT)

    async def started(self) -> list[pb.JoinReply]:
        await self.shard()
        return list(await asyncio.gather(self.join("a"), self.join("b")))


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, LIMIT))


def checkpointed(directory: Path, slices: tuple[Slice, ...] = (), step: int = 9) -> None:
    """Leaves a checkpoint in the directory."""
    folder = manifest.begin(directory)
    manifest.publish(folder, Manifest("train.py", "bsp", step, 5, (BUCKET,), slices, ()))


def test_whoever_waits_hears_at_once_that_the_last_worker_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.notifier.PATIENCE", 10 * LIMIT)

    async def story() -> None:
        hub = Hub(monkeypatch, lease=100 * LIMIT)
        await hub.shard()
        first = asyncio.create_task(hub.join("a"))
        while not hub.coordinator._changes._changed._waiters:
            await asyncio.sleep(0)
        assert (await hub.join("b")).state == pb.JoinReply.READY
        assert (await first).state == pb.JoinReply.READY

    run(story())


def test_shards_that_come_after_all_workers_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, workers=1, lease=0.02)
        early = await hub.join("a")
        assert early.state == pb.JoinReply.WAITING
        assert "shards" in early.text
        await hub.coordinator.tick()
        assert (await hub.shard()).lease_seconds > 0
        assert (await hub.join("a")).state == pb.JoinReply.READY
        assert [view.ranks for view in hub.fleet.views] == [(0,)]
        assert (await hub.shard("late")).lease_seconds == 0

    run(story())


def test_a_start_that_came_to_nothing_neither_ends_the_server_nor_forgets_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpointed(tmp_path)

    async def story() -> None:
        hub = Hub(monkeypatch, once=True, lease=0.02, checkpoint_dir=tmp_path)
        await hub.shard()
        lonely = await hub.join("a", job="other.py")
        assert lonely.state == pb.JoinReply.WAITING
        hub.time.advance(1.0)
        await hub.coordinator.tick()
        assert not hub.coordinator.done.is_set()
        joined = await asyncio.gather(hub.join("b"), hub.join("c"))
        assert min(reply.incarnation for reply in joined) > lonely.incarnation
        assert hub.coordinator.blueprint.restored is not None

    run(story())


@pytest.mark.parametrize(("reason", "step"), [("FAILED", 9), ("FINISHED", 0)])
def test_a_job_that_broke_off_goes_on_where_a_finished_one_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, step: int
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, checkpoint_dir=tmp_path)
        for joined in await hub.started():
            await hub.leave(joined, reason)
        checkpointed(tmp_path)
        await hub.coordinator.tick()
        restored = hub.coordinator.blueprint.restored
        assert (restored[1].step if restored else 0) == step

    run(story())


@pytest.mark.parametrize("stopped", [False, True])
def test_the_hub_answers_while_a_broken_off_jobs_checkpoint_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: bool
) -> None:
    answered, newest = threading.Event(), manifest.newest

    def slow(directory: Path) -> tuple[Path, Manifest] | None:
        assert answered.wait(LIMIT), "the loop stood still"
        return newest(directory)

    async def story() -> None:
        hub = Hub(monkeypatch, lease=0.1, checkpoint_dir=tmp_path)
        for joined in await hub.started():
            await hub.leave(joined, "FAILED")
        checkpointed(tmp_path)
        monkeypatch.setattr(manifest, "newest", slow)
        ticking = asyncio.create_task(hub.coordinator.tick())
        while hub.coordinator.last_job == "":  # what is set just before the checkpoint is read
            await asyncio.sleep(0)
        assert (await hub.join("early")).state == pb.JoinReply.WAITING
        if stopped:
            await hub.coordinator.drain()
        answered.set()
        await ticking
        await hub.coordinator.tick()  # the first may have gone on without the end
        assert hub.coordinator.done.is_set() == stopped
        assert (hub.coordinator.blueprint.restored is None) == stopped

    run(story())


def test_leases_run_while_a_checkpoint_waits_for_its_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, lease=5.0, checkpoint_dir=tmp_path, checkpoint_every=1.0)
        first, second = await hub.started()
        await hub.plan(first)
        hub.time.advance(2.0)
        await hub.coordinator.tick()
        assert await hub.fleet.saves.get() == 1
        hub.time.advance(4.0)
        await hub.beat(first)
        await hub.coordinator.tick()
        assert hub.fleet.views[-1].ranks == (first.rank,)
        assert second.rank != first.rank
        await hub.leave(first)
        ticking = asyncio.create_task(hub.coordinator.tick())
        assert await hub.fleet.saves.get() == -1, "the last checkpoint is of a job at rest"
        hub.fleet.may_save.set()
        await ticking
        assert [path.name for path in tmp_path.iterdir()] == ["000001-step-0"]

    run(story())


def test_a_shard_that_holds_nothing_does_not_keep_a_step_from_being_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, shards=2, checkpoint_dir=tmp_path)
        hub.fleet.may_save.set()
        await hub.shard("t")
        both = await hub.started()
        await hub.plan(both[0])
        assert {piece.shard for piece in hub.coordinator.blueprint.plan.slices} == {0}
        hub.fleet.versions[0] = 5
        for joined in both:
            await hub.leave(joined)
        await hub.coordinator.tick()
        assert [path.name for path in tmp_path.iterdir()] == ["000001-step-5"]

    run(story())


def test_a_view_that_a_leave_did_not_bring_about_is_brought_by_the_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        first, second = await hub.started()
        async with hub.coordinator._publishing:  # the shards are slow, and the caller loses patience
            leaving = asyncio.create_task(hub.leave(first))
            await asyncio.sleep(0)
            leaving.cancel()
        await hub.coordinator.tick()
        assert hub.fleet.views[-1].ranks == (second.rank,)

    run(story())


def test_nobody_comes_late_to_a_hub_that_holds_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregate = BucketSpec(0, "float32", 0, "", BUCKET.tensors)

    async def story() -> None:
        hub = Hub(monkeypatch)
        first, second = await hub.started()
        assert not (await hub.plan(first, aggregate)).refused
        await hub.leave(second)
        late = await hub.join("c")
        assert late.late
        assert "--aggregate" in (await hub.plan(late, aggregate)).refused
        assert hub.fleet.views[-1].ranks == (first.rank,), "no round waits for it"

    run(story())


def test_slices_are_the_workers_to_try_and_all_get_those_that_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, slice_bytes=None)
        await hub.shard()
        both = await asyncio.gather(hub.join("a"), hub.join("b"))
        for joined in both:
            reply = await hub.plan(joined)
            assert reply.undecided
            assert not reply.slices
        for joined in both:
            assert len((await hub.plan(joined, slice_bytes=8, trial=True)).slices) == 2
        assert hub.fleet.plans == [[2, 2]], "the second to ask finds the shards ready"
        for joined in both:
            reply = await hub.plan(joined, slice_bytes=4)
            assert not reply.undecided
            assert len(reply.slices) == 4
        assert hub.fleet.plans == [[2, 2], [1, 1, 1, 1]]
        assert "nothing to try" in (await hub.plan(both[0], slice_bytes=8, trial=True)).refused

    run(story())


def test_slices_lie_on_as_many_shards_as_the_workers_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def owners(wanted: int) -> list[int]:
        hub = Hub(monkeypatch, slice_bytes=None, shards=2)
        await hub.shard("s")
        await hub.shard("t")
        first, _ = await asyncio.gather(hub.join("a"), hub.join("b"))
        reply = await hub.plan(first, slice_bytes=4, shards=wanted)
        return sorted({piece.shard for piece in reply.slices})

    assert run(owners(1)) == [0]
    assert run(owners(0)) == [0, 1], "who asks for nothing gets all"
    assert run(owners(3)) == [0, 1], "and there are no more"


def test_who_comes_while_sizes_are_tried_waits_for_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, slice_bytes=None)
        first, second = await hub.started()
        await hub.leave(second)
        late = await hub.join("c")
        assert late.late
        planning = asyncio.create_task(hub.plan(late))
        await hub.plan(first, slice_bytes=8, trial=True)
        assert not planning.done()
        await hub.plan(first, slice_bytes=8)
        assert len((await asyncio.wait_for(planning, LIMIT)).slices) == 2

    run(story())


def test_who_loses_its_place_while_others_plan_has_no_say_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, slice_bytes=None)
        first, _ = await hub.started()
        hub.fleet.may_plan.clear()
        trials = [asyncio.create_task(hub.plan(first, slice_bytes=size, trial=True)) for size in (8, 4)]
        await asyncio.sleep(0)
        await hub.leave(first)
        hub.fleet.may_plan.set()
        assert len((await trials[0]).slices) == 2
        with pytest.raises(Refused, match="has left the job"):
            await trials[1]
        assert hub.fleet.plans == [[2, 2]]

    run(story())


def test_the_next_jobs_plan_waits_for_the_last_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        both = await hub.started()
        hub.fleet.may_plan.clear()
        old = asyncio.create_task(hub.plan(both[0]))
        await asyncio.sleep(0)
        for joined in both:
            await hub.leave(joined)
        await hub.coordinator.tick()
        first, _ = await asyncio.gather(hub.join("c"), hub.join("d"))
        new = asyncio.create_task(hub.plan(first))
        while not hub.coordinator._planning._waiters:
            await asyncio.sleep(0)
        hub.fleet.may_plan.set()
        await asyncio.gather(old, new)
        assert len(hub.fleet.plans) == 2

    run(story())


def test_who_comes_and_waits_in_vain_for_the_choice_asks_again_and_does_not_count_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        monkeypatch.setattr("hubring.ps.coordinator.notifier.PATIENCE", 0.0)
        hub = Hub(monkeypatch, slice_bytes=None)
        first, second = await hub.started()
        await hub.plan(first)
        await hub.leave(second)
        late = await hub.join("c")
        reply = await hub.plan(late)
        assert reply.undecided
        assert hub.fleet.views[-1].ranks == (first.rank,), "no round of the trial waits for it"
        await hub.plan(first, slice_bytes=8)
        reply = await hub.plan(late)
        assert (reply.undecided, len(reply.slices)) == (False, 2)
        assert list(hub.fleet.views[-1].ranks) == [0, 1]

    run(story())


def test_who_comes_when_nobody_is_left_to_choose_gets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, slice_bytes=None)
        first, second = await hub.started()
        await hub.plan(first)
        await hub.leave(second, "FAILED")
        late = await hub.join("c", rank=second.rank)
        planning = asyncio.create_task(hub.plan(late))
        await hub.leave(first, "FAILED")
        assert len((await asyncio.wait_for(planning, LIMIT)).slices) == 1

    run(story())


def test_models_are_compared_before_sizes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    other = BucketSpec(0, "float32", 0, "SGD", (TensorSpec("weight", (5,)),))

    async def story() -> None:
        hub = Hub(monkeypatch, slice_bytes=None)
        first, second = await hub.started()
        assert (await hub.plan(first)).undecided
        assert (
            "weight [5] float32 where weight [4] float32 is held" in (await hub.plan(second, other)).refused
        )
        await hub.coordinator.tick()
        assert "workers are not alike" in hub.fleet.failures[0], "who tries sizes already hears of it"

    run(story())


def test_who_comes_to_a_job_that_fails_before_it_has_slices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, slice_bytes=None)
        first, second = await hub.started()
        await hub.leave(second)
        late = await hub.join("c")
        hub.coordinator.job.fail(JobFailed("beyond help"))
        assert (await hub.plan(late)).refused == "beyond help"
        assert not (await hub.plan(first)).refused

    run(story())


def test_a_checkpoints_cuts_are_kept_unless_others_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slices = (Slice(0, 0, 0, 3, 0), Slice(1, 0, 3, 1, 1))
    checkpointed(tmp_path, slices)

    async def story() -> None:
        hub = Hub(monkeypatch, checkpoint_dir=tmp_path, slice_bytes=None)
        first, _ = await hub.started()
        reply = await hub.plan(first)
        assert not reply.undecided
        assert [(piece.offset, piece.numel, piece.shard) for piece in reply.slices] == [(0, 3, 0), (3, 1, 0)]
        other = Hub(monkeypatch, checkpoint_dir=tmp_path, slice_bytes=8)
        first, _ = await other.started()
        assert "another --slice-bytes" in (await other.plan(first)).refused

    run(story())


def test_a_late_rank_0_gives_its_parameters_lest_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        giver = next(joined for joined in await hub.started() if joined.rank == 0)
        await hub.leave(giver, "FAILED")
        again = await hub.join("c", rank=0)
        assert again.late
        assert not (await hub.plan(again)).initialised

    run(story())


def test_a_status_is_given_though_a_shard_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        await hub.shard()
        hub.fleet.shards[0].told = pb.ShardStats(pushes=7)
        hub.fleet.silent_ones = True
        (row,) = (await hub.coordinator.status())["shards"]
        assert row["error"] == "shard 0 (here pid 1) does not answer"
        assert row["pushes"] == 7, "what it told last"

    run(story())


def test_only_members_write_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        first, _ = await hub.started()
        note = pb.RendezvousRequest(rank=first.rank, incarnation=first.incarnation, key="ring", value="there")
        assert (await hub.control.Rendezvous(note, CONTEXT)).value == "there"
        await hub.leave(first)
        with pytest.raises(Refused, match="has left the job"):
            await hub.control.Rendezvous(note, CONTEXT)

    run(story())


def test_a_ring_waits_for_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, workers=1)
        assert (await hub.join("a", topology="ring")).state == pb.JoinReply.READY
        assert (await hub.shard()).lease_seconds > 0, "it is there for the next job"

    run(story())


def test_a_shard_that_registers_again_after_the_start_keeps_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        await hub.started()
        again = await hub.shard()
        assert (again.shard, again.lease_seconds > 0) == (0, True)

    run(story())


def test_whoever_waits_is_told_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        first, second = await hub.started()
        await hub.beat(second, step=119)
        assert f"rank {second.rank}" in (await hub.beat(first, step=119, waiting=10.0)).slowest
        await hub.beat(second, step=119, waiting=9.0)
        assert (await hub.beat(first, step=119, waiting=11.0)).slowest == ""

    run(story())


def test_whoever_asks_is_told_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub, before = Hub(monkeypatch), time.time_ns()
        told = (await hub.control.Clock(pb.ClockRequest(), CONTEXT)).time_ns
        assert before <= told <= time.time_ns()

    run(story())
