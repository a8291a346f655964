"""Workers choose how gradients are cut, and all get what was chosen."""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import OF_WORKERS, Manifest, begin, publish
from hubring.ps.coordinator import agreed_model
from hubring.ps.coordinator.checkpoints import CheckpointContent
from hubring.ps.core.errors import JobFailed
from hubring.ps.core.types import BucketSpec, Slice, TensorSpec
from hubring.ps.job import control_messages
from hubring.ps.job.sharding import MAX_SLICES
from tests.support.fakes.coordinator import BUCKET, LIMIT, Hub, Refused, in_training


async def test_slices_are_the_workers_to_try_and_all_get_those_that_were_chosen() -> None:
    hub = Hub(slice_bytes=None)
    await hub.shard()
    both = await asyncio.gather(hub.join("a"), hub.join("b"))
    for joined in both:
        reply = await hub.plan(joined)
        assert reply.undecided
        assert not reply.slices
    for joined in both:
        assert len((await hub.plan(joined, slice_bytes=8, trial=1)).slices) == 2
    assert hub.fleet.plans == [[2, 2]], "the second to ask finds the shards ready"
    await hub.plan(both[0], slice_bytes=16, trial=2)
    again = await hub.plan(both[1], slice_bytes=8, trial=1)
    assert (len(again.slices), again.step) == (2, 1), "a worker in a lost one's place repeats what is over"
    for joined in both:
        reply = await hub.plan(joined, slice_bytes=4)
        assert not reply.undecided
        assert len(reply.slices) == 4
    assert hub.fleet.plans == [[2, 2], [4], [1, 1, 1, 1]]
    assert (await hub.plan(both[1], slice_bytes=16, trial=2)).step == 1, "the last trial is over too"
    assert "no worker can try other slices" in (await hub.plan(both[0], slice_bytes=8, trial=3)).refused


@pytest.mark.parametrize(("wanted", "owners"), [(1, {0}), (0, {0, 1}), (3, {0, 1})])
async def test_slices_lie_on_as_many_shards_as_the_workers_ask_for(wanted: int, owners: set[int]) -> None:
    """Who asks for nothing gets all, and there are no more than two."""
    hub = Hub(slice_bytes=None, shards=2)
    await hub.shard("s")
    await hub.shard("t")
    first, _ = await asyncio.gather(hub.join("a"), hub.join("b"))
    reply = await hub.plan(first, slice_bytes=4, shards=wanted)
    assert {piece.shard for piece in reply.slices} == owners


async def test_a_late_worker_waits_until_the_slice_size_is_chosen() -> None:
    hub, first, second = await in_training(slice_bytes=None)
    await hub.leave(second)
    late = await hub.join("c")
    assert late.late
    planning = asyncio.create_task(hub.plan(late))
    await hub.plan(first, slice_bytes=8, trial=1)
    assert not planning.done()
    await hub.plan(first, slice_bytes=8)
    assert len((await asyncio.wait_for(planning, LIMIT)).slices) == 2


async def test_a_worker_that_left_can_no_longer_change_the_plan() -> None:
    hub, first, _ = await in_training(slice_bytes=None)
    hub.fleet.may_plan.clear()
    trial = asyncio.create_task(hub.plan(first, slice_bytes=8, trial=1))
    while not hub.fleet.planning:
        await asyncio.sleep(0)
    second_trial = asyncio.create_task(hub.plan(first, slice_bytes=4, trial=2))
    await hub.leave(first)
    hub.fleet.may_plan.set()
    assert len((await trial).slices) == 2
    with pytest.raises(Refused, match="it left the job"):
        await second_trial
    assert hub.fleet.plans == [[2, 2]]


async def test_the_next_jobs_plan_waits_for_the_last_jobs() -> None:
    hub, *both = await in_training()
    hub.fleet.may_plan.clear()
    old = asyncio.create_task(hub.plan(both[0]))
    while not hub.fleet.planning:
        await asyncio.sleep(0)
    for joined in both:
        await hub.leave(joined)
    await hub.coordinator.tick()
    first, _ = await asyncio.gather(hub.join("c"), hub.join("d"))
    new = asyncio.create_task(hub.plan(first))
    while not hub.fleet.plan_lock._waiters:
        await asyncio.sleep(0)
    hub.fleet.may_plan.set()
    await asyncio.gather(old, new)
    assert len(hub.fleet.plans) == 2


async def test_a_late_worker_is_no_member_until_the_first_step_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.joining.PATIENCE", 0.0)
    hub, first, second = await in_training(slice_bytes=None)
    await hub.plan(first)
    await hub.leave(second)
    late = await hub.join("c")
    reply = await hub.plan(late)
    assert reply.undecided
    assert hub.fleet.views[-1].ranks == (first.rank,), "no round of the trial waits for it"
    await hub.plan(first, slice_bytes=8)
    reply = await hub.plan(late)
    assert reply.undecided
    assert hub.fleet.views[-1].ranks == (first.rank,), "the first worker shows its gradients to no other"
    await hub.beat(first, step=1)
    reply = await hub.plan(late)
    assert (reply.undecided, len(reply.slices), reply.step) == (False, 2, 1)
    assert list(hub.fleet.views[-1].ranks) == [0, 1]


async def test_a_late_worker_gets_the_default_if_no_chooser_is_left() -> None:
    hub, first, second = await in_training(slice_bytes=None)
    await hub.plan(first)
    await hub.leave(second, "FAILED")
    late = await hub.join("c", rank=second.rank)
    planning = asyncio.create_task(hub.plan(late))
    await hub.leave(first, "FAILED")
    assert len((await asyncio.wait_for(planning, LIMIT)).slices) == 1


async def test_models_are_compared_before_sizes_are_tried() -> None:
    other = BucketSpec(0, "float32", "SGD", (TensorSpec("weight", (5,)),))

    hub, first, second = await in_training(slice_bytes=None)
    assert (await hub.plan(first)).undecided
    assert "expected weight [4] float32, got weight [5] float32" in (await hub.plan(second, other)).refused
    await hub.coordinator.tick()
    assert "the workers differ: " in hub.fleet.failures[0], "who tries sizes already hears of it"


async def test_a_late_worker_gets_the_failure_of_a_job_without_slices() -> None:
    hub, first, second = await in_training(slice_bytes=None)
    await hub.leave(second)
    late = await hub.join("c")
    hub.coordinator.job.fail(JobFailed("beyond help"))
    assert (await hub.plan(late)).refused == "beyond help"
    assert not (await hub.plan(first)).refused


MORE = BucketSpec(1, "float32", "SGD", (TensorSpec("head", (6,)),))


async def test_buckets_join_the_job_once_at_the_step_of_the_others() -> None:
    hub, *both = await in_training(slice_bytes=8)
    for joined in both:
        assert len((await hub.plan(joined)).slices) == 2
    hub.fleet.versions[0] = 7
    for joined in both:
        reply = await hub.plan(joined, MORE)
        assert [(piece.key, piece.bucket) for piece in reply.slices] == [
            (0, 0),
            (1, 0),
            (2, 1),
            (3, 1),
            (4, 1),
        ]
        assert not reply.initialised
    assert hub.fleet.extensions == [([2, 3, 4], "", 7)]


@pytest.mark.parametrize(
    ("bucket", "says"),
    [
        (BucketSpec(2, "float32", "SGD", MORE.tensors), "buckets from index 2 cannot join this job of 1"),
        (BucketSpec(1, "float32", "SGD", (TensorSpec("weight", (4,)),)), "parameter weight is in the job"),
    ],
)
async def test_buckets_that_cannot_join_are_refused(bucket: BucketSpec, says: str) -> None:
    hub, first, _ = await in_training()
    await hub.plan(first)
    assert says in (await hub.plan(first, bucket)).refused


async def test_workers_whose_joining_buckets_differ_fail_the_job() -> None:
    hub, first, second = await in_training()
    for joined in (first, second):
        await hub.plan(joined)
    await hub.plan(first, MORE)
    other = BucketSpec(1, "float32", "SGD", (TensorSpec("head", (7,)),))
    assert "expected head [6] float32, got head [7] float32" in (await hub.plan(second, other)).refused


async def test_a_restored_job_gets_the_saved_values_when_its_script_adds_the_group_again(
    tmp_path: Path,
) -> None:
    slices = (Slice(0, 0, 0, 4, 0), Slice(1, 1, 0, 6, 0))
    folder = checkpoint_folder.begin(tmp_path)
    manifest = Manifest("train.py", "bsp", 9, 5, (BUCKET, MORE), slices, (), joined=(1, 1))
    path = checkpoint_folder.publish(folder, manifest)

    hub, *both = await in_training(checkpoint_dir=tmp_path)
    for joined in both:
        reply = await hub.plan(joined)
        assert [piece.key for piece in reply.slices] == [0]
        assert reply.initialised
    for joined in both:
        reply = await hub.plan(joined, MORE)
        assert not reply.refused
        assert [piece.key for piece in reply.slices] == [0, 1]
        assert reply.initialised
    assert hub.fleet.extensions == [([1], str(path), 0)]
    third = BucketSpec(2, "float32", "SGD", (TensorSpec("tail", (2,)),))
    assert not (await hub.plan(both[0], third)).initialised


TRY = partial(Hub.plan, slice_bytes=8, trial=1)


def held(monkeypatch: pytest.MonkeyPatch, work: str) -> tuple[Event, Event]:
    """Makes a function of the coordinator wait; returns when it has begun, and when it may go on."""
    name, begun, may_end = f"hubring.ps.coordinator.{work}", Event(), Event()
    function = pkgutil.resolve_name(name)

    def waits(*arguments: Any) -> Any:
        begun.set()
        assert may_end.wait(LIMIT)
        return function(*arguments)

    monkeypatch.setattr(name, waits)
    return begun, may_end


@pytest.mark.parametrize(
    ("work", "call"),
    [
        ("control_service.control_messages.checked_buckets", Hub.plan),
        ("agreed_model.AgreedModel.check", Hub.plan),
        ("agreed_model.AgreedModel.draw", Hub.plan),
        ("agreed_model.AgreedModel.draw_trial", TRY),
        ("control_service.slices_to_proto", Hub.plan),
        ("joining.assignment", Hub.plan),
        ("joining.assignment", TRY),
    ],
)
async def test_a_heartbeat_is_answered_while_a_plan_is_made(
    monkeypatch: pytest.MonkeyPatch, work: str, call: Callable[[Hub, pb.JoinReply], Awaitable[pb.PlanReply]]
) -> None:
    hub, first, second = await in_training(slice_bytes=None if call is TRY else 64)
    begun, may_end = held(monkeypatch, work)
    planning = asyncio.ensure_future(call(hub, first))
    while not begun.is_set():
        await asyncio.sleep(0)
    await hub.beat(second)
    may_end.set()
    await planning


@pytest.mark.parametrize("call", [Hub.plan, TRY])
async def test_the_plan_of_a_worker_that_leaves_meanwhile_goes_to_no_shard(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Hub, pb.JoinReply], Awaitable[pb.PlanReply]]
) -> None:
    hub, first, _ = await in_training(slice_bytes=None if call is TRY else 64)
    begun, may_end = held(monkeypatch, "agreed_model.make_plan")
    planning = asyncio.ensure_future(call(hub, first))
    while not begun.is_set():
        await asyncio.sleep(0)
    await hub.leave(first)
    may_end.set()
    with pytest.raises(Refused, match="it left the job"):
        await planning
    assert not hub.fleet.plans


async def test_the_slices_are_put_into_messages_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    control_messages.slices_to_proto.cache_clear()
    made = Mock(side_effect=control_messages.slice_to_proto)
    monkeypatch.setattr(control_messages, "slice_to_proto", made)
    hub = Hub(slice_bytes=4)
    replies = [await hub.plan(joined) for joined in await hub.started()]
    assert replies[0] == replies[1]
    assert made.call_count == len(replies[0].slices) == 4


@pytest.mark.parametrize(
    ("numel", "slice_bytes", "count"), [(1 << 24, 8, 1 << 23), (1 << 40, 4 << 20, 1 << 20)]
)
async def test_too_many_slices_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, numel: int, slice_bytes: int, count: int
) -> None:
    hub, first, _ = await in_training(slice_bytes=None)
    bucket = BucketSpec(0, "float32", "SGD", (TensorSpec("weight", (numel,)),))
    with monkeypatch.context() as patch:
        patch.setattr(agreed_model, "make_plan", None)
        trial, chosen = [
            (await hub.plan(first, bucket, slice_bytes, trial=trial)).refused for trial in (1, 0)
        ]
    assert trial == chosen
    assert f"at most {slice_bytes} bytes cut this model into {count} slices" in trial
    larger = int(trial.rpartition("restart the server with --slice-bytes ")[2])
    assert MAX_SLICES / 4 < len((await hub.plan(first, bucket, larger)).slices) <= MAX_SLICES


async def test_slices_that_join_a_job_count_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed_model, "MAX_SLICES", 4)
    hub, first, _ = await in_training(slice_bytes=8)
    assert len((await hub.plan(first)).slices) == 2
    assert "into 5 slices, but a job has at most 4" in (await hub.plan(first, MORE)).refused


def test_a_checkpoint_has_the_buckets_that_all_shards_saved() -> None:
    slices = (Slice(0, 0, 0, 4, 0), Slice(1, 1, 0, 3, 0), Slice(2, 1, 3, 3, 1))
    whole = Manifest("job", "bsp", 0, 1, (BUCKET, MORE), slices, (), joined=(1, 1))
    held = CheckpointContent(whole, lockstep=True, together=True, running=True)
    assert held.saved({0, 1, 2}) == whole
    for keys in ({0}, {0, 1}):
        part = held.saved(keys)
        assert (part.buckets, part.slices, part.joined) == ((BUCKET,), slices[:1], (1,))


async def test_a_hub_in_the_folder_of_a_ring_says_that_it_starts_afresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(begin(tmp_path / OF_WORKERS), Manifest("job", "workers", 7, 1, (), (), ()))
    hub, *both = await in_training(checkpoint_dir=tmp_path)
    for joined in both:
        await hub.plan(joined)
    told = f"starts at step 0: the checkpoint of step 7 in {tmp_path} is of workers"
    assert caplog.text.count(told) == 1
    assert told in (await hub.beat(both[0])).news[0]
