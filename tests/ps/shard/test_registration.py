"""A shard's heartbeats while replies are damaged or do not come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.shard import process
from hubring.ps.shard.process import Registration
from hubring.ps.standby.reconnection import Verdict
from hubring.ps.transport.grpc.insistent_call import InsistentCalls

SOON = 10.0
Reply = pb.ShardHeartbeatReply


class Coordinator:
    """A stub that gives these replies, and then none; also an open call. None is a damaged reply."""

    def __init__(self, replies: Sequence[Reply | None]) -> None:
        self._replies = list(replies)
        self.unanswered = threading.Event()
        """Set once a heartbeat gets no reply."""
        self.ShardHeartbeat = self

    def future(self, request: pb.ShardHeartbeatRequest, timeout: float) -> Future[Reply | None]:
        call: Future[Reply | None] = Future()
        if self._replies:
            call.set_result(self._replies.pop(0))
        else:
            self.unanswered.set()
        return call

    def Connect(self, request: pb.ConnectRequest) -> Coordinator:  # noqa: N802
        return self

    def is_active(self) -> bool:
        return True

    def cancel(self) -> None:
        """Does nothing."""


def registered(replies: Sequence[Reply | None]) -> tuple[Registration, Coordinator]:
    """Returns a shard that has its place."""
    shard, coordinator = Registration.__new__(Registration), Coordinator(replies)
    stub: Any = coordinator
    shard._stub, shard._token, shard._control = stub, "token", "hub:1"
    shard._reply = pb.RegisterShardReply(lease_seconds=90.0, silent_seconds=4.0)
    shard._orphaned, shard._heartbeats, shard.failure = threading.Event(), InsistentCalls(), None
    return shard, coordinator


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_shard_goes_on_after_replies_without_a_message(
    monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    monkeypatch.setattr(process, "RETRY_SECONDS", 0.0)
    shard, _ = registered([*[None] * damaged, Reply(stop=True)])
    ended: list[bool] = []
    shard._beat(lambda: ended.append(True), bytes, lambda stream: None)
    assert (ended, shard.failure) == ([True], None)


@pytest.mark.parametrize(
    ("replies", "verdict"),
    [
        ([None, Reply(given_up=True)], Verdict.ALONE),
        ([None, None], Verdict.WAIT),
        ([Reply(stop=True)], Verdict.STOP),
    ],
)
def test_a_shard_asks_again_about_its_standby_after_a_reply_without_a_message(
    replies: list[Reply | None], verdict: Verdict
) -> None:
    shard, _ = registered(replies)
    assert shard.ask(b"stream", unreachable=False) is verdict


def test_a_shard_ends_with_its_parent_while_its_heartbeat_waits_for_a_reply() -> None:
    shard, coordinator = registered([])
    ended = threading.Event()
    shard.keep(ended.set, bytes, lambda stream: None)
    assert coordinator.unanswered.wait(SOON)
    shard._orphaned.set()
    assert ended.wait(SOON)
    assert shard.failure is None
