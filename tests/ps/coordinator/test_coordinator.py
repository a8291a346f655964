"""The coordinator: who comes, who waits, who is lost, and what the next job begins with."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.coordinator.shard_fleet import ShardSilent
from hubring.ps.core.types import BucketSpec, Slice
from hubring.ps.job.membership import JOIN_SECONDS
from tests.support.fakes.coordinator import BUCKET, LIMIT, Hub, checkpointed, in_training


async def test_waiting_workers_are_notified_when_the_last_worker_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.joining.PATIENCE", 10 * LIMIT)

    hub = Hub(lease=100 * LIMIT)
    await hub.shard()
    first = asyncio.create_task(hub.join("a"))
    while not hub.coordinator._notifier._changed._waiters:
        await asyncio.sleep(0)
    assert (await hub.join("b")).state == pb.JoinReply.READY
    assert (await first).state == pb.JoinReply.READY


async def test_shards_that_come_after_all_workers_are_taken_in() -> None:
    hub = Hub(workers=1, lease=0.02)
    early = await hub.join("a")
    assert early.state == pb.JoinReply.WAITING
    assert "shards" in early.text
    await hub.coordinator.tick()
    assert (await hub.shard()).lease_seconds > 0
    assert (await hub.join("a")).state == pb.JoinReply.READY
    assert [view.ranks for view in hub.fleet.views] == [(0,)]
    assert (await hub.shard("late")).lease_seconds == 0


async def test_a_start_that_came_to_nothing_neither_ends_the_server_nor_forgets_its_checkpoint(
    tmp_path: Path,
) -> None:
    checkpointed(tmp_path)

    hub = Hub(once=True, lease=0.02, checkpoint_dir=tmp_path)
    await hub.shard()
    lonely = await hub.join("a", job="other.py")
    assert lonely.state == pb.JoinReply.WAITING
    await hub.tick_after(JOIN_SECONDS + 1.0)
    assert not hub.coordinator.done.is_set()
    joined = await asyncio.gather(hub.join("b"), hub.join("c"))
    assert min(reply.incarnation for reply in joined) > lonely.incarnation
    assert hub.coordinator.agreed_model.restored is not None


@pytest.mark.parametrize(("reason", "step"), [("FAILED", 9), ("FINISHED", 0)])
async def test_a_job_that_broke_off_goes_on_where_a_finished_one_begins_anew(
    tmp_path: Path, reason: str, step: int
) -> None:
    hub = Hub(checkpoint_dir=tmp_path)
    for joined in await hub.started():
        await hub.leave(joined, reason)
    checkpointed(tmp_path)
    await hub.coordinator.tick()
    restored = hub.coordinator.agreed_model.restored
    assert (restored[1].step if restored else 0) == step


@pytest.mark.parametrize("stopped", [False, True])
async def test_the_hub_answers_while_a_broken_off_jobs_checkpoint_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: bool
) -> None:
    answered, newest = threading.Event(), checkpoint_folder.newest

    def slow(directory: Path) -> tuple[Path, Manifest] | None:
        assert answered.wait(LIMIT), "the loop stood still"
        return newest(directory)

    hub = Hub(lease=0.1, checkpoint_dir=tmp_path)
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


async def test_leases_run_while_a_checkpoint_waits_for_its_step(tmp_path: Path) -> None:
    hub, first, second = await in_training(lease=5.0, checkpoint_dir=tmp_path, checkpoint_every=1.0)
    await hub.plan(first)
    for each in (first, second):
        await hub.beat(each, step=1)
    await hub.tick_after(2.0)
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


@pytest.mark.parametrize(("settings", "apart"), [({}, 0), ({"mode": "backup", "backup": 1}, 2)])
async def test_the_last_checkpoint_has_the_step_of_the_slowest_key(
    tmp_path: Path, settings: dict[str, Any], apart: int
) -> None:
    hub = Hub(shards=2, checkpoint_dir=tmp_path, **settings)
    hub.fleet.may_save.set()
    await hub.shard("empty")
    both = await hub.started()
    await hub.plan(both[0])
    assert {piece.shard for piece in hub.coordinator.agreed_model.plan.slices} == {0}
    hub.fleet.versions[0], hub.fleet.apart = 5, apart
    for joined in both:
        await hub.leave(joined)
    await hub.coordinator.tick()
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-5"]


async def test_a_view_that_a_leave_did_not_bring_about_is_brought_by_the_next_tick() -> None:
    hub, first, second = await in_training()
    async with hub.fleet._view_lock:  # the shards are slow, and the caller loses patience
        leaving = asyncio.create_task(hub.leave(first))
        await asyncio.sleep(0)
        leaving.cancel()
    await hub.coordinator.tick()
    assert hub.fleet.views[-1].ranks == (second.rank,)


@pytest.mark.parametrize("optimizer", ["", "SGD"])
async def test_a_late_worker_is_refused_by_a_hub_that_holds_no_parameters(optimizer: str) -> None:
    aggregate = BucketSpec(0, "float32", "", BUCKET.tensors)

    hub, first, second = await in_training()
    assert not (await hub.plan(first, aggregate)).refused
    await hub.leave(second, "FAILED")
    (lost,) = (await hub.beat(first)).news
    assert lost.endswith("the job continues with 1 of 2 workers"), "no replacement is asked for"
    assert hub.reporter.report([])["replace"] == {}
    late = await hub.join("c")
    assert late.late
    offered = BucketSpec(0, "float32", optimizer, BUCKET.tensors)
    assert "the hub only averages in this job" in (await hub.plan(late, offered)).refused
    assert hub.fleet.views[-1].ranks == (first.rank,), "no round waits for it"


async def test_a_checkpoints_cuts_are_kept_unless_others_are_asked_for(tmp_path: Path) -> None:
    slices = (Slice(0, 0, 0, 3, 0), Slice(1, 0, 3, 1, 1))
    checkpointed(tmp_path, slices)

    hub, first, _ = await in_training(checkpoint_dir=tmp_path, slice_bytes=None)
    reply = await hub.plan(first)
    assert not reply.undecided
    assert [(piece.offset, piece.numel, piece.shard) for piece in reply.slices] == [(0, 3, 0), (3, 1, 0)]
    other = Hub(checkpoint_dir=tmp_path, slice_bytes=8)
    first, _ = await other.started()
    assert "--slice-bytes has changed" in (await other.plan(first)).refused


async def test_a_late_rank_0_gives_its_parameters_lest_nobody_has() -> None:
    hub = Hub()
    giver = next(joined for joined in await hub.started() if joined.rank == 0)
    await hub.leave(giver, "FAILED")
    again = await hub.join("c", rank=0)
    assert again.late
    assert not (await hub.plan(again)).initialised


async def test_a_shard_that_registers_again_after_the_start_keeps_its_number() -> None:
    hub, *_ = await in_training()
    again = await hub.shard()
    assert (again.shard, again.lease_seconds > 0) == (0, True)


async def test_a_shard_that_stays_silent_is_reported_with_one_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> None:
        raise ShardSilent("shard 0 does not answer (UNAVAILABLE: gone)")

    hub, *_ = await in_training()
    monkeypatch.setattr(hub.coordinator, "_check", silent)
    await hub.coordinator.tick()
    text = str(hub.coordinator.failure)
    assert text.startswith("shard 0 does not answer (UNAVAILABLE: gone), at about step 0")
    assert text.count("estart the job from its checkpoint") == 0
    assert text.count("estart the server") == 1
