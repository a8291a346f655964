"""The coordinator: who comes, who waits, who is lost, and what the next job begins with."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.coordinator.shard_fleet import ShardSilent
from hubring.ps.core.types import BucketSpec, Slice
from hubring.ps.job.membership import JOIN_SECONDS
from tests.support.fakes.coordinator import BUCKET, CONTEXT, LIMIT, Hub, Refused, checkpointed, run


def test_whoever_waits_hears_at_once_that_the_last_worker_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.notifier.PATIENCE", 10 * LIMIT)

    async def story() -> None:
        hub = Hub(monkeypatch, lease=100 * LIMIT)
        await hub.shard()
        first = asyncio.create_task(hub.join("a"))
        while not hub.coordinator._notifier._changed._waiters:
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
        hub.time.advance(JOIN_SECONDS + 1.0)
        await hub.coordinator.tick()
        assert not hub.coordinator.done.is_set()
        joined = await asyncio.gather(hub.join("b"), hub.join("c"))
        assert min(reply.incarnation for reply in joined) > lonely.incarnation
        assert hub.coordinator.agreed_model.restored is not None

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
        restored = hub.coordinator.agreed_model.restored
        assert (restored[1].step if restored else 0) == step

    run(story())


@pytest.mark.parametrize("stopped", [False, True])
def test_the_hub_answers_while_a_broken_off_jobs_checkpoint_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: bool
) -> None:
    answered, newest = threading.Event(), checkpoint_folder.newest

    def slow(directory: Path) -> tuple[Path, Manifest] | None:
        assert answered.wait(LIMIT), "the loop stood still"
        return newest(directory)

    async def story() -> None:
        hub = Hub(monkeypatch, lease=0.1, checkpoint_dir=tmp_path)
        for joined in await hub.started():
            await hub.leave(joined, "FAILED")
        checkpointed(tmp_path)
        monkeypatch.setattr(checkpoint_folder, "newest", slow)
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
        assert (hub.coordinator.agreed_model.restored is None) == stopped

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
        assert {piece.shard for piece in hub.coordinator.agreed_model.plan.slices} == {0}
        hub.fleet.versions[0] = 5
        for joined in both:
            await hub.leave(joined)
        await hub.coordinator.tick()
        assert [path.name for path in tmp_path.iterdir()] == ["000001-step-5"]

    run(story())


def test_the_last_checkpoint_of_backup_workers_has_the_step_of_the_slowest_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, mode="backup", backup=1, checkpoint_dir=tmp_path)
        hub.fleet.may_save.set()
        both = await hub.started()
        await hub.plan(both[0])
        hub.fleet.versions[0], hub.fleet.apart = 5, 2
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
        assert "--slice-bytes has changed" in (await other.plan(first)).refused

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
        hub.fleet.shards[0].last_stats = pb.ShardStats(pushes=7)
        hub.fleet.silent_ones = True
        (row,) = (await hub.coordinator.status())["shards"]
        assert row["error"] == "shard 0 (here pid 1) does not answer"
        assert row["pushes"] == 7, "what it told last"

    run(story())


def test_only_members_leave_values_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        first, _ = await hub.started()
        note = pb.RendezvousRequest(rank=first.rank, incarnation=first.incarnation, key="ring", value="there")
        assert (await hub.control.Rendezvous(note, CONTEXT)).value == "there"
        await hub.leave(first)
        with pytest.raises(Refused, match="it left the job"):
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


def test_a_shard_that_stays_silent_is_reported_with_one_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> None:
        raise ShardSilent("shard 0 does not answer (UNAVAILABLE: gone)")

    async def story() -> None:
        hub = Hub(monkeypatch)
        await hub.started()
        monkeypatch.setattr(hub.coordinator, "_check", silent)
        await hub.coordinator.tick()
        text = str(hub.coordinator.failure)
        assert text.startswith("shard 0 does not answer (UNAVAILABLE: gone), at about step 0")
        assert text.count("estart the job from its checkpoint") == 0
        assert text.count("estart the server") == 1

    run(story())
