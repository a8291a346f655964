"""A shard's heartbeats while replies are damaged or do not come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.shard import process
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.shard.process import Registration
from hubring.ps.shard.standby import StandbyVerdict
from hubring.ps.transport.grpc.calls import InsistentCalls
from tests.support.fakes.heartbeats import Heartbeats

SOON = 10.0
Reply = pb.ShardHeartbeatReply


def registered(replies: Sequence[Reply | None]) -> tuple[Registration, Heartbeats]:
    """Returns a shard that has its place."""
    shard, coordinator = Registration.__new__(Registration), Heartbeats(replies)
    stub: Any = coordinator
    shard._stub, shard._token, shard._control = stub, "token", "hub:1"
    shard._presence = stub
    shard._reply = pb.RegisterShardReply(lease_seconds=90.0, silent_seconds=4.0)
    shard._orphaned, shard._heartbeats, shard.failure = threading.Event(), InsistentCalls(), None
    return shard, coordinator


class Loop(ShardLoop):
    """A loop without a standby."""

    stream = (b"", False)

    def __init__(self) -> None:
        self.ended = threading.Event()

    def stop(self) -> None:
        self.ended.set()


def test_a_shard_goes_on_after_replies_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RETRY_SECONDS", 0.0)
    shard, _ = registered([None, None, Reply(stop=True)])
    loop = Loop()
    shard._beat(loop)
    assert (loop.ended.is_set(), shard.failure) == (True, None)


@pytest.mark.parametrize(
    ("replies", "verdict"),
    [
        ([None, Reply(given_up=True)], StandbyVerdict.ALONE),
        ([None, None], StandbyVerdict.WAIT),
        ([Reply(stop=True)], StandbyVerdict.STOP),
    ],
)
def test_a_shard_asks_again_about_its_standby_after_a_reply_without_a_message(
    replies: list[Reply | None], verdict: StandbyVerdict
) -> None:
    shard, _ = registered(replies)
    assert shard.ask(b"stream", unreachable=False) is verdict


def test_a_shard_ends_with_its_parent_while_its_heartbeat_waits_for_a_reply() -> None:
    shard, coordinator = registered([])
    loop = Loop()
    shard.keep(loop)
    assert coordinator.unanswered.wait(SOON)
    shard._orphaned.set()
    assert loop.ended.wait(SOON)
    assert shard.failure is None
