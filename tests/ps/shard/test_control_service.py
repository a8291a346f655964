from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from hubring.protos import control_pb2 as pb
from hubring.ps.core.messages import Code, Init, Pull, Push, Refusal
from hubring.ps.core.types import BucketSpec, Member, Sender, Slice, TensorSpec, View
from hubring.ps.job.control_messages import bucket_to_proto, slice_to_proto
from hubring.ps.shard.control_service import ShardControl
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.shm.transport import ShmTransport

SOON = 10.0
BUCKET = BucketSpec(0, "float32", "SGD", (TensorSpec("weight", (4,)),))
SGD = {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": 0, "maximize": 0}


class Aborted(Exception):
    """Ends a call, as gRPC's own exception does."""


class Caller:
    """The coordinator's end of a call, which it may give up."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.patience: float | None = None
        self.killed = False
        self._told: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._told.append(callback)
        self.waits.set()
        return True

    def is_active(self) -> bool:
        return not self.killed

    def time_remaining(self) -> float | None:
        return self.patience

    def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Aborted(f"{code.name}: {text}")

    def give_up(self) -> None:
        for callback in self._told:
            callback()


CALLER: Any = Caller()
PLAN = pb.ShardAssignment(buckets=[bucket_to_proto(BUCKET)], slices=[slice_to_proto(Slice(0, 0, 0, 4, 0))])


@pytest.fixture
def loop() -> Iterator[ShardLoop]:
    """A shard with one key, initialised, in a thread of its own."""
    loop = ShardLoop(BSP(), [ShmTransport().listen("127.0.0.1")])
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.command(lambda: loop.store.assign([Slice(0, 0, 0, 4, 0)], [BUCKET])).result(SOON)
    loop.command(lambda: loop.store.on_view(View(1, (Member(0, 1),)))).result(SOON)
    loop.command(lambda: loop.store.handle(Init(Sender(0, 1), 0, torch.ones(4)), "ticket")).result(SOON)
    yield loop
    loop.stop()
    thread.join(SOON)
    assert not thread.is_alive()


@pytest.fixture
def control(loop: ShardLoop) -> ShardControl:
    control = ShardControl()
    control.serve(loop, 0)
    return control


def save(control: ShardControl, folder: Path | str, step: int = -1, caller: Any = CALLER) -> pb.SaveReply:
    return control.Save(pb.SaveRequest(directory=str(folder), step=step), caller)


def test_a_save_that_nobody_waits_for_makes_room_for_the_next(control: ShardControl, tmp_path: Path) -> None:
    caller = Caller()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(save, control, tmp_path, 7, caller)
        assert caller.waits.wait(SOON)
        second = pool.submit(save, control, tmp_path)
        caller.give_up()
        assert "step 7" in first.result(SOON).refused
        assert list(second.result(SOON).keys) == [0]


def test_a_file_that_cannot_be_written_is_told(control: ShardControl, tmp_path: Path) -> None:
    refused = save(control, tmp_path / "missing").refused
    assert f"cannot write {tmp_path / 'missing' / 'shard-0.safetensors'}" in refused
    assert "the server shares with the hosts of all shards" in refused


def test_parameters_that_are_not_finite_are_not_saved(
    loop: ShardLoop, control: ShardControl, tmp_path: Path
) -> None:
    loop.command(lambda: loop.store._entries[0].values[2].fill_(torch.inf)).result(SOON)
    refused = save(control, tmp_path).refused
    assert refused.startswith("shard 0: weight [4] holds inf after step 0; checkpoints are not affected")
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_met_what_is_not_finite_saves_nothing_more(
    loop: ShardLoop, control: ShardControl, tmp_path: Path
) -> None:
    push = Push(Sender(0, 1), 0, 0, torch.full((4,), torch.nan), SGD)
    loop.command(lambda: loop.store.handle(push, "push")).result(SOON)
    assert "in the middle of a step" in save(control, tmp_path).refused
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("exit_code", "code"), [(1, Code.NOT_FINITE), (69, Code.JOB_FAILED), (78, Code.MISMATCH)]
)
def test_workers_of_a_failed_job_are_refused_in_clean_words_that_end_them_alike(
    loop: ShardLoop, control: ShardControl, exit_code: int, code: Code
) -> None:
    control.Fail(pb.FailRequest(text="\x1b[31mbecause" + "!" * 100_000, exit_code=exit_code), CALLER)
    ((_, reply),) = loop.command(lambda: loop.store.handle(Pull(Sender(0, 1), 0), "pull")).result(SOON)
    assert isinstance(reply, Refusal)
    assert reply.code is code
    assert reply.text.startswith("\N{REPLACEMENT CHARACTER}because!")
    assert len(reply.text) < 10_000


def test_a_command_given_while_the_loop_ends_is_not_left_waiting() -> None:
    loop = ShardLoop(BSP(), [])
    loop.stop()
    command = loop.command(lambda: None)
    loop.run()
    assert command.done()


def test_a_shards_traffic_is_that_of_its_job_without_the_trials_before(
    loop: ShardLoop, control: ShardControl
) -> None:
    def exchanged() -> int:
        def count() -> int:
            loop.traffic.bytes_received += 4
            return loop.traffic.bytes_received

        return loop.command(count).result(SOON)

    def counted() -> int:
        return int(control.Stats(pb.StatsRequest(), CALLER).bytes_in)

    assert exchanged() == counted() == 4
    control.SetPlan(PLAN, CALLER)
    assert counted() == 0
    assert exchanged() == counted() == 4
    control.Reset(pb.ResetRequest(), CALLER)
    assert counted() == 0


def test_a_plan_of_a_coordinator_that_was_killed_does_not_replace_a_later_one(control: ShardControl) -> None:
    late: Any = Caller()
    control.SetPlan(PLAN, CALLER)
    late.killed = True
    control.SetPlan(pb.ShardAssignment(), late)
    assert control.Stats(pb.StatsRequest(), CALLER).keys == 1


def test_a_call_that_comes_as_the_shard_ends_is_answered_without_a_traceback() -> None:
    loop, control = ShardLoop(BSP(), []), ShardControl()
    control.serve(loop, 3)
    loop.stop()
    loop.run()
    with pytest.raises(Aborted, match="UNAVAILABLE: shard 3 is exiting"):
        control.Stats(pb.StatsRequest(), CALLER)


def test_a_call_waits_for_a_busy_loop_no_longer_than_its_caller() -> None:
    control, hurried = ShardControl(), Caller()
    hurried.patience = 0.0
    caller: Any = hurried
    with pytest.raises(Aborted, match="DEADLINE_EXCEEDED: this shard has not joined"):
        control.Stats(pb.StatsRequest(), caller)
    control.serve(ShardLoop(BSP(), []), 3)
    with pytest.raises(Aborted, match="DEADLINE_EXCEEDED: shard 3 is busy"):
        control.Stats(pb.StatsRequest(), caller)


def test_a_standby_that_follows_a_shard_before_it_serves_keeps_that_shard_s_number(
    loop: ShardLoop, tmp_path: Path
) -> None:
    control = ShardControl()
    follow = pb.FollowRequest(shard=1, stream=b"secret")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(control.Follow, follow, CALLER)
        assert not wait([early], 0.2).done
        control.serve(loop, 0)
        early.result(SOON)
    control.Promote(pb.PromoteRequest(), CALLER)
    assert save(control, tmp_path).file == "shard-1.safetensors"


def test_late_calls_of_a_coordinator_that_was_killed_change_no_standby(loop: ShardLoop) -> None:
    control, late = ShardControl(), Caller()
    dead: Any = late
    late.killed = True
    control.serve(loop, 0)
    control.Follow(pb.FollowRequest(shard=1, stream=b"current"), CALLER)
    control.Follow(pb.FollowRequest(shard=2, stream=b"of the dead"), dead)
    control.Promote(pb.PromoteRequest(), dead)
    assert (loop._followed, control._index) == (b"current", 1)


def test_a_standby_that_follows_another_shard_forgets_what_it_knew(loop: ShardLoop) -> None:
    control = ShardControl()
    control.serve(loop, 0)
    control.SetPlan(PLAN, CALLER)
    control.Drain(pb.DrainRequest(), CALLER)
    control.Follow(pb.FollowRequest(shard=1, stream=b"secret"), CALLER)
    assert loop._history.calls() == []


@pytest.mark.parametrize("path", ["", "relative/folder", "/folder/../etc", "/folder\x1b[31m"])
def test_a_path_that_is_relative_or_leads_elsewhere_is_refused(
    control: ShardControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = save(control, path).refused
    assert "use an absolute path in --checkpoint-dir" in refused
    assert "\x1b" not in refused
    assert list(tmp_path.iterdir()) == []
    assert dict(control.Stats(pb.StatsRequest(), CALLER).refused) == {"path": 1}
