"""A shard and its standby, each in a thread of this process, over every transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from hubring.protos import control_pb2 as pb
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Command, CoordinatorCall, Forwarded
from hubring.ps.core.types import BucketSpec, Slice, TensorSpec, incarnation_to_wire
from hubring.ps.job.plan_protos import bucket_to_proto, slice_to_proto
from hubring.ps.shard.coordinator_calls import action
from hubring.ps.shard.following import Following, promote
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.shard.replication import Replication
from hubring.ps.standby.reconnection import Verdict
from hubring.ps.store.consistency import ASP, BSP, Consistency
from hubring.ps.store.snapshot import Snapshot
from hubring.ps.transport.registry import FASTEST_FIRST, ShardAddress, host_id, transport
from tests.support.transports.one_shard import SOON, OneShard, begin, push

SECRET = b"secret of stream"


class Duo:
    """A shard with one worker, and its standby."""

    def __init__(self, wire: str, consistency: Consistency) -> None:
        self.verdict = Verdict.WAIT
        self.asked = threading.Event()
        self.unreachable = False
        """Whether the last question was about a standby that cannot be reached."""
        self.replaced = threading.Event()
        self.shard = OneShard(consistency, 1, transport(wire))
        self.standby = OneShard(consistency, 1, transport(wire))
        self.standby.tell(lambda: setattr(self.standby.loop, "following", Following(SECRET, 0)))
        self.replication = Replication(self.ask, lambda why: self.replaced.set())
        self.place = ShardAddress(host_id(), {wire: self.standby.address})
        self.replicate(SECRET)

    def replicate(self, stream: bytes, *, wanted: bool = True) -> None:
        """Returns once the standby has the shard's state."""
        self.replication.begin(self.shard.loop, self.place, stream, lambda: wanted).result(SOON)

    def follow(self, stream: bytes) -> None:
        self.standby.tell(lambda: self.standby.loop.follow(Following(stream, 0)))

    def ask(self, stream: bytes, unreachable: bool) -> Verdict:
        assert stream == SECRET
        self.unreachable = unreachable
        self.asked.set()
        return self.verdict

    def promote(self) -> None:
        self.standby.tell(lambda: promote(self.standby.loop))

    def stop(self) -> None:
        self.verdict = Verdict.STOP
        self.shard.stop()
        self.standby.stop()


@pytest.fixture(params=FASTEST_FIRST)
def duo(request: pytest.FixtureRequest) -> Iterator[Duo]:
    duo = Duo(request.param, ASP())
    yield duo
    duo.stop()


def captured(loop: ShardLoop) -> Snapshot:
    assert loop.store.capture_at(None)
    snapshot = loop.store.captured()
    assert snapshot is not None
    return snapshot


def values(shard: OneShard) -> torch.Tensor:
    return shard.ask(captured)[0].values


def test_what_a_worker_sees_is_on_the_standby(duo: Duo) -> None:
    client = duo.shard.client(0)
    into = begin(client)
    for step in range(5):
        push(client, torch.full((6,), float(step)), into).wait(SOON)
        assert torch.equal(values(duo.standby), into)
    client.close()
    assert into.tolist() == [10.0] * 6


def test_a_replaced_shard_answers_nobody_and_learns_why(duo: Duo) -> None:
    client = duo.shard.client(0)
    into = begin(client)
    duo.promote()
    work = push(client, torch.ones(6), into, attended=False)
    assert duo.replaced.wait(SOON)
    assert not work.done
    client.close()
    late = duo.standby.client(0)
    assert begin(late).tolist() == [0.0] * 6  # serves workers now
    late.close()


def test_answers_wait_for_a_standby_that_is_lost_until_it_is_given_up(duo: Duo) -> None:
    client = duo.shard.client(0)
    into = begin(client)
    duo.standby.stop()
    work = push(client, torch.ones(6), into, attended=False)
    assert duo.asked.wait(SOON)
    assert not work.done
    duo.verdict = Verdict.ALONE
    work.wait(SOON)
    assert into.tolist() == [1.0] * 6
    push(client, torch.ones(6), into).wait(SOON)
    client.close()


class Saved:
    """A checkpoint with the parameters of a shard, and who reads it."""

    def __init__(self, shard: OneShard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readers: list[str] = []
        self.snapshot = shard.ask(captured)
        monkeypatch.setattr("hubring.ps.shard.coordinator_calls.shard_file.load", self.load)

    def load(self, folder: Path, keys: Sequence[int]) -> Snapshot:
        self.readers.append(threading.current_thread().name)
        return dict.fromkeys(keys, self.snapshot[0])


def plan(key: int, **changes: Any) -> CoordinatorCall:
    """Returns the plan of one more key like key 0."""
    bucket = BucketSpec(key, "float32", 0, "SGD", (TensorSpec("weight", (6,)),))
    message = pb.ShardAssignment(
        buckets=[bucket_to_proto(bucket)], slices=[slice_to_proto(Slice(key, key, 0, 6, 0))], **changes
    )
    return CoordinatorCall(Command.SET_PLAN, message.SerializeToString())


def test_a_standby_gets_what_its_shard_restores_and_reads_no_checkpoint(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = duo.shard.client(0)
    into = begin(client)
    push(client, torch.ones(6), into).wait(SOON)
    client.close()
    saved = Saved(duo.shard, monkeypatch)
    for call in (plan(0, restore="/saved", version=7), plan(1, restore="/saved", version=7, extends=True)):
        duo.shard.loop.change(call, action(call, 0)).result(SOON)
    first, second = duo.shard.ask(captured), duo.standby.ask(captured)
    assert second.keys() == {0, 1}
    for key, state in second.items():
        assert state.values.tolist() == [1.0] * 6
        assert (state.version, state.clocks) == (first[key].version, first[key].clocks)
    assert saved.readers == [threading.current_thread().name] * 2


def test_a_standby_hears_of_no_plan_that_its_shard_refuses(duo: Duo) -> None:
    message = pb.ShardAssignment.FromString(plan(0).message)
    message.buckets[0].optimizer = "unknown"
    call = CoordinatorCall(Command.SET_PLAN, message.SerializeToString())
    with pytest.raises(ConfigError):
        duo.shard.loop.change(call, action(call, 0)).result(SOON)
    client = duo.shard.client(0)
    into = begin(client)
    push(client, torch.ones(6), into).wait(SOON)
    client.close()
    assert torch.equal(values(duo.standby), into)


def test_a_call_that_fails_only_on_a_standby_ends_it() -> None:
    class Loop:
        def obey(self, call: CoordinatorCall, act: object) -> None:
            raise ConfigError("the plan cannot be used")

    loop: Any = Loop()
    with pytest.raises(ConfigError):
        Following(SECRET, 0).take(loop, 0, Forwarded(SECRET, plan(0)), "ticket")


OTHER = b"another stream"


@pytest.mark.parametrize("promoted", [False, True])
def test_a_shard_whose_standby_follows_another_stream_goes_on_alone(duo: Duo, promoted: bool) -> None:
    client = duo.shard.client(0)
    into = begin(client)
    duo.follow(OTHER)
    if promoted:
        duo.promote()
    duo.verdict = Verdict.ALONE
    push(client, torch.ones(6), into).wait(SOON)
    assert duo.unreachable
    assert not duo.replaced.is_set()
    client.close()


def test_a_late_call_of_a_coordinator_that_was_killed_does_not_replace_a_stream() -> None:
    duo = Duo("shm", ASP())
    try:
        client = duo.shard.client(0)
        into = begin(client)
        duo.replicate(OTHER, wanted=False)
        assert duo.shard.loop.stream == SECRET
        push(client, torch.ones(6), into).wait(SOON)
        assert torch.equal(values(duo.standby), into)
        client.close()
    finally:
        duo.stop()


def test_a_transfer_that_the_end_of_its_shard_interrupts_is_cancelled() -> None:
    duo = Duo("shm", ASP())
    held = threading.Event()
    duo.follow(OTHER)
    duo.standby.loop.command(lambda: held.wait(SOON))
    duo.shard.tell(lambda: duo.shard.loop.leave_standby(SECRET))
    received = duo.replication.begin(duo.shard.loop, duo.place, OTHER, lambda: True)
    duo.shard.until(lambda loop: loop.stream == OTHER)
    duo.shard.stop()
    with pytest.raises(CancelledError):
        received.result(SOON)
    held.set()
    duo.standby.stop()


def test_a_call_of_the_coordinator_returns_once_the_standby_has_it_too(duo: Duo) -> None:
    members = [pb.Member(rank=rank, incarnation=incarnation_to_wire(rank + 1)) for rank in range(2)]
    call = CoordinatorCall(Command.SET_VIEW, pb.View(epoch=2, members=members).SerializeToString())
    duo.shard.loop.change(call, action(call, 0)).result(SOON)
    late = duo.shard.client(1)
    into = begin(late)
    push(late, torch.ones(6), into).wait(SOON)
    late.close()
    assert values(duo.standby).tolist() == [1.0] * 6


def test_a_standby_refuses_workers_and_other_streams() -> None:
    duo = Duo("shm", BSP())
    try:
        stranger = duo.standby.client(0)
        with pytest.raises(Exception, match="a standby and serves no workers yet"):
            begin(stranger)
        stranger.close()
    finally:
        duo.stop()
