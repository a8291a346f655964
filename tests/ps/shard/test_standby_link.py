"""A shard and its standby, each in a thread of this process, over every transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hubring.protos import control_pb2 as pb
from hubring.ps.client.client import KVClient
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import CoordinatorCall, Forwarded, StoreCommand
from hubring.ps.core.types import INCARNATION_BYTES, BucketSpec, Slice, TensorSpec
from hubring.ps.job.control_messages import bucket_to_proto, slice_to_proto
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.shard.standby import Follower, StandbyLink, StandbyVerdict, action
from hubring.ps.store.consistency import ASP
from hubring.ps.store.key_state import Snapshot
from hubring.ps.transport.host import host_id
from hubring.ps.transport.registry import FASTEST_FIRST, ShardAddress, transport
from tests.support.transports.one_shard import SOON, OneShard, begin, push

SECRET = b"secret of stream"


class Duo:
    """A shard with one worker, and its standby."""

    def __init__(self, wire: str) -> None:
        self.verdict = StandbyVerdict.WAIT
        self.asked = threading.Event()
        self.unreachable = False
        """Whether the last question was about a standby that cannot be reached."""
        self.replaced = threading.Event()
        self.shard = OneShard(ASP(), 1, transport(wire))
        self.standby = OneShard(ASP(), 1, transport(wire))
        self.standby.tell(self._follow_with_its_keys)
        self.standby_link = StandbyLink(self.ask, lambda why: self.replaced.set())
        self.place = ShardAddress(host_id(), {wire: self.standby.address})
        self.replicate(SECRET)

    def replicate(self, stream: bytes, *, wanted: bool = True) -> None:
        """Returns once the standby has the shard's state."""
        self.standby_link.begin(self.shard.loop, self.place, stream, lambda: wanted).result(SOON)

    def _follow_with_its_keys(self) -> None:
        """Follows without a reset: the standby has been given the shard's keys as the shard has."""
        loop = self.standby.loop
        loop._followed, loop._stand_by = SECRET, Follower(loop, SECRET, 0).answer

    def follow(self, stream: bytes) -> None:
        loop = self.standby.loop
        self.standby.tell(lambda: loop.follow(stream, Follower(loop, stream, 0).answer))

    def ask(self, stream: bytes, unreachable: bool) -> StandbyVerdict:
        assert stream == SECRET
        self.unreachable = unreachable
        self.asked.set()
        return self.verdict

    def promote(self) -> None:
        self.standby.tell(self.standby.loop.promote)

    def worker(self) -> tuple[KVClient, torch.Tensor]:
        """Returns a client of the shard, and where its parameters land."""
        client = self.shard.client(0)
        return client, begin(client)

    def stop(self) -> None:
        self.verdict = StandbyVerdict.STOP
        self.shard.close()
        self.standby.close()


@pytest.fixture(params=FASTEST_FIRST)
def duo(request: pytest.FixtureRequest) -> Iterator[Duo]:
    duo = Duo(request.param)
    yield duo
    duo.stop()


@pytest.fixture
def pair() -> Iterator[Duo]:
    """The same over one transport, where it makes no difference."""
    pair = Duo("shm")
    yield pair
    pair.stop()


def captured(loop: ShardLoop) -> Snapshot:
    assert loop.store.capture_at(None)
    snapshot = loop.store.captured()
    assert snapshot is not None
    return snapshot


def values(shard: OneShard) -> torch.Tensor:
    return shard.ask(captured)[0].values


def test_values_that_a_worker_received_are_on_the_standby(duo: Duo) -> None:
    client, into = duo.worker()
    for step in range(5):
        push(client, torch.full((6,), float(step)), into).wait(SOON)
        assert torch.equal(values(duo.standby), into)
    assert into.tolist() == [10.0] * 6


def test_a_replaced_shard_answers_nobody_and_learns_why(duo: Duo) -> None:
    client, into = duo.worker()
    duo.promote()
    work = push(client, torch.ones(6), into, attended=False)
    assert duo.replaced.wait(SOON)
    assert not work.done
    late = duo.standby.client(0)
    assert begin(late).tolist() == [0.0] * 6  # serves workers now


def test_answers_wait_for_a_standby_that_is_lost_until_it_is_given_up(duo: Duo) -> None:
    client, into = duo.worker()
    duo.standby.stop()
    work = push(client, torch.ones(6), into, attended=False)
    assert duo.asked.wait(SOON)
    assert not work.done
    duo.verdict = StandbyVerdict.ALONE
    work.wait(SOON)
    assert into.tolist() == [1.0] * 6
    push(client, torch.ones(6), into).wait(SOON)


class Saved:
    """A checkpoint with the parameters of a shard, and who reads it."""

    def __init__(self, shard: OneShard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readers: list[str] = []
        self.snapshot = shard.ask(captured)
        monkeypatch.setattr("hubring.ps.shard.standby.shard_file.load", self.load)

    def load(self, folder: Path, keys: Sequence[int]) -> Snapshot:
        self.readers.append(threading.current_thread().name)
        return dict.fromkeys(keys, self.snapshot[0])


def plan(key: int, **changes: Any) -> CoordinatorCall:
    """Returns the plan of one more key like key 0."""
    bucket = BucketSpec(key, "float32", "SGD", (TensorSpec("weight", (6,)),))
    message = pb.ShardAssignment(
        buckets=[bucket_to_proto(bucket)], slices=[slice_to_proto(Slice(key, key, 0, 6, 0))], **changes
    )
    return CoordinatorCall(StoreCommand.SET_PLAN, message.SerializeToString())


def test_a_standby_gets_what_its_shard_restores_and_reads_no_checkpoint(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, into = duo.worker()
    push(client, torch.ones(6), into).wait(SOON)
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
    call = CoordinatorCall(StoreCommand.SET_PLAN, message.SerializeToString())
    with pytest.raises(ConfigError):
        duo.shard.loop.change(call, action(call, 0)).result(SOON)
    client, into = duo.worker()
    push(client, torch.ones(6), into).wait(SOON)
    assert torch.equal(values(duo.standby), into)


def test_a_call_that_fails_only_on_a_standby_ends_it() -> None:
    class Loop:
        def obey(self, call: CoordinatorCall, act: object) -> None:
            raise ConfigError("the plan cannot be used")

    loop: Any = Loop()
    with pytest.raises(ConfigError):
        Follower(loop, SECRET, 0).answer(0, Forwarded(SECRET, plan(0)), loop)


OTHER = b"another stream"


@pytest.mark.parametrize("promoted", [False, True])
def test_a_shard_whose_standby_follows_another_stream_goes_on_alone(duo: Duo, promoted: bool) -> None:
    client, into = duo.worker()
    duo.follow(OTHER)
    if promoted:
        duo.promote()
    duo.verdict = StandbyVerdict.ALONE
    push(client, torch.ones(6), into).wait(SOON)
    assert duo.unreachable
    assert not duo.replaced.is_set()


def test_a_late_call_of_a_coordinator_that_was_killed_does_not_replace_a_stream(pair: Duo) -> None:
    client, into = pair.worker()
    pair.replicate(OTHER, wanted=False)
    assert pair.shard.loop.stream[0] == SECRET
    push(client, torch.ones(6), into).wait(SOON)
    assert torch.equal(values(pair.standby), into)


def test_a_transfer_that_the_end_of_its_shard_interrupts_is_cancelled(pair: Duo) -> None:
    held = threading.Event()
    pair.follow(OTHER)
    pair.standby.loop.command(lambda: held.wait(SOON))
    pair.shard.tell(lambda: pair.shard.loop.leave_standby(SECRET))
    received = pair.standby_link.begin(pair.shard.loop, pair.place, OTHER, lambda: True)
    pair.shard.until(lambda loop: loop.stream[0] == OTHER)
    pair.shard.stop()
    with pytest.raises(CancelledError):
        received.result(SOON)
    pair.standby.loop.stop()  # before it takes what came for keys that it has forgotten
    held.set()


def test_a_call_of_the_coordinator_returns_once_the_standby_has_it_too(duo: Duo) -> None:
    members = [pb.Member(rank=rank, incarnation=(rank + 1).to_bytes(INCARNATION_BYTES)) for rank in range(2)]
    call = CoordinatorCall(StoreCommand.SET_VIEW, pb.View(epoch=2, members=members).SerializeToString())
    duo.shard.loop.change(call, action(call, 0)).result(SOON)
    late = duo.shard.client(1)
    into = begin(late)
    push(late, torch.ones(6), into).wait(SOON)
    assert values(duo.standby).tolist() == [1.0] * 6


def test_a_standby_refuses_workers(pair: Duo) -> None:
    with pytest.raises(Exception, match="a standby and serves no workers yet"):
        begin(pair.standby.client(0))


def test_changes_are_applied_in_order_and_once() -> None:
    applied: list[CoordinatorCall] = []
    loop: Any = SimpleNamespace(obey=lambda call, act: applied.append(call))
    follower = Follower(loop, SECRET, 0)

    def taken(number: int) -> list[object]:
        change = Forwarded(SECRET, CoordinatorCall(StoreCommand.DRAIN, bytes([number])))
        return [ticket for ticket, _ in follower.answer(number, change, f"ticket {number}")]

    assert [taken(number) for number in (1, 0, 0, 2)] == [
        [],
        ["ticket 0", "ticket 1"],
        ["ticket 0"],
        ["ticket 2"],
    ]
    assert [call.message for call in applied] == [b"\0", b"\1", b"\2"]
