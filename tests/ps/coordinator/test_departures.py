"""All workers of a job learn the same verdict, and none before the last checkpoint is written."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.core.types import INCARNATION_BYTES, incarnation_from_wire
from tests.support.fakes.coordinator import CONTEXT, LIMIT, Hub, checkpointed, in_training


async def seated(hub: Hub) -> list[pb.JoinReply]:
    """Two workers whose parameters are on the hub."""
    both = await hub.started()
    await hub.plan(both[0])
    return both


@pytest.mark.parametrize("once", [True, False])
async def test_a_finished_worker_hears_of_the_end_once_the_last_checkpoint_is_written(
    tmp_path: Path, once: bool
) -> None:
    hub = Hub(checkpoint_dir=tmp_path, once=once)
    first, second = await seated(hub)
    assert f"rank {second.rank}" in (await hub.leave(first)).awaits
    assert (await hub.leave(second)).awaits == "the last checkpoint"
    ending = asyncio.create_task(hub.coordinator.tick())
    assert await hub.fleet.saves.get() == -1
    assert (await hub.leave(first)).awaits == "the last checkpoint"
    hub.fleet.may_save.set()
    await ending
    for joined in (first, second):
        assert await hub.leave(joined) == pb.LeaveReply()
    assert hub.coordinator.done.is_set() == once


async def test_a_worker_that_finished_before_the_job_failed_fails_too() -> None:
    hub, first, second = await in_training(mode="asp")
    await hub.leave(first)
    await hub.leave(second, "DIVERGED")
    await hub.coordinator.tick()
    assert (await hub.leave(first)).exit_code == 1


@pytest.mark.parametrize("over", [False, True])
async def test_a_worker_that_lost_its_place_before_it_left_is_refused(over: bool) -> None:
    hub, first, second = await in_training(lease=5.0)
    hub.time.advance(4.0)
    await hub.beat(second)
    await hub.tick_after(4.0)
    if over:
        await hub.leave(second)
        await hub.coordinator.tick()
    reply = await hub.leave(first)
    assert (reply.awaits, reply.exit_code) == ("", 75)
    assert "it sent no heartbeat for 8.0 s" in reply.failed


@pytest.mark.parametrize("once", [True, False])
async def test_a_worker_that_wakes_late_learns_how_its_job_ended(once: bool) -> None:
    hub, first, second = await in_training(lease=5.0, once=once)
    hub.time.advance(4.0)
    await hub.beat(first)
    await hub.tick_after(4.0)
    await hub.leave(first)
    await hub.coordinator.tick()
    woken = await hub.beat(second)
    assert woken.fenced
    assert "job 'train.py' is over: it finished (1 finished, 1 lost)" in woken.failed
    assert "it sent no heartbeat for 8.0 s (lease: 5 s)" in woken.failed


async def over() -> Hub:
    """Returns a hub whose only job is over: all workers finished."""
    hub = Hub(once=True)
    for joined in await hub.started():
        await hub.leave(joined)
    await hub.coordinator.tick()
    return hub


async def test_a_replacement_that_comes_too_late_is_told_that_the_job_is_over() -> None:
    hub = await over()
    late = await hub.join("late")
    assert (late.state, late.exit_code) == (pb.JoinReply.REFUSED, 78)
    assert "job 'train.py' is over (2 finished)" in late.text


async def test_a_server_waits_until_the_finished_workers_know_the_verdict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub, first, second = await in_training(once=True)
    monkeypatch.setattr("hubring.ps.coordinator.joining.PATIENCE", 0.0)  # the server waits longer
    for joined in (first, second):
        await hub.leave(joined)
    await hub.coordinator.tick()
    goodbye = asyncio.create_task(hub.coordinator.wait_until_told([], 10 * LIMIT))
    for joined in (first, second, first):  # the reply to the first was lost
        assert (await hub.leave(joined)).awaits == ""
    await hub.leave(first, heard=True)
    assert not goodbye.done()
    await hub.leave(second, heard=True)
    await goodbye
    assert "did not confirm" not in caplog.text


async def test_a_server_does_not_wait_forever_for_a_finished_worker(caplog: pytest.LogCaptureFixture) -> None:
    hub = await over()
    await hub.coordinator.wait_until_told([], 0.0)
    assert "rank 0 finished, but did not confirm that it knows how the job ended" in caplog.text


async def test_a_server_that_stops_long_after_its_last_job_waits_for_no_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = await over()
    hub.time.advance(hub.coordinator.config.lease + 1.0)
    await hub.coordinator.wait_until_told([], 10 * LIMIT)
    assert "did not confirm" not in caplog.text


async def test_a_server_forgets_who_did_not_confirm_an_earlier_job() -> None:
    hub = Hub(workers=1)
    await hub.shard()
    for token in "ab":
        joined = await hub.join(token)
        await hub.leave(joined)
        await hub.coordinator.tick()
    waiting = [sender.incarnation for sender in hub.coordinator.departures.waiting]
    assert waiting == [incarnation_from_wire(joined.incarnation)]


async def test_a_worker_that_brings_its_shard_keeps_its_place_while_the_shards_learn_of_it() -> None:
    hub = Hub(lease=2.0, workers=1)
    await hub.shard()
    hub.fleet.shards[0].heard = 1000.0
    async with hub.fleet._view_lock:  # the shards are slow
        joining = asyncio.create_task(hub.join("a"))
        while not hub.coordinator.job.started:
            await asyncio.sleep(0)
        hub.time.advance(14.0)
        hub.coordinator.job.expire(hub.time.now())
    assert (await joining).state == pb.JoinReply.READY
    hub.time.advance(3.0)
    assert [member.rank for member in hub.coordinator.job.expire(hub.time.now())] == [0]


async def test_the_hub_answers_while_a_checkpoint_is_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered, publish = threading.Event(), checkpoint_folder.publish

    def slow(folder: Path, manifest: Manifest) -> Path:
        assert answered.wait(LIMIT), "the loop stood still"
        return publish(folder, manifest)

    hub = Hub(checkpoint_dir=tmp_path)
    both = await seated(hub)
    monkeypatch.setattr(checkpoint_folder, "publish", slow)
    hub.fleet.may_save.set()
    saving = asyncio.create_task(hub.coordinator.checkpoints.save())
    await hub.fleet.saves.get()
    for joined in both:
        await hub.beat(joined)
    answered.set()
    path, _ = await saving
    assert path.is_dir()


async def test_a_worker_of_a_server_that_restarted_is_refused(tmp_path: Path) -> None:
    checkpointed(tmp_path)

    hub = Hub(checkpoint_dir=tmp_path)
    request = pb.LeaveRequest(rank=0, incarnation=(3).to_bytes(INCARNATION_BYTES))
    reply = await hub.control.Leave(request, CONTEXT)
    assert (reply.awaits, reply.exit_code) == ("", 75)
    assert "has restarted since" in reply.failed


async def test_a_ring_waits_for_no_shard() -> None:
    hub = Hub(workers=1, shards=0, await_shards=2)
    assert (await hub.join("a", topology="ring")).state == pb.JoinReply.READY


@pytest.mark.parametrize(("heard", "patience"), [(-6.0, 100 * LIMIT), (0.0, 0.0)])
async def test_the_server_stays_neither_for_a_silent_guest_nor_for_ever(
    heard: float, patience: float
) -> None:
    hub = Hub(shards=0, await_shards=1, lease=5.0)
    await hub.shard("guest")
    hub.fleet.shards[0].heard = heard
    await hub.coordinator.wait_until_told(hub.fleet.shards, patience)
