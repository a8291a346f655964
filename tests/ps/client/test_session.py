"""What a session tells the threads that wait for data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.client.rendezvous import ShardLocations
from hubring.ps.client.server_calls import MemberCalls, Silence
from hubring.ps.client.session import Session
from hubring.ps.core.errors import HubringError, JobFailed
from hubring.ps.core.timing import Waiting
from hubring.ps.job.membership import RETRY_SECONDS, heartbeat_seconds
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.transport.grpc.calls import InsistentCalls
from tests.support.fakes.failed_call import FailedCall
from tests.support.fakes.heartbeats import Heartbeats

SOON = 10.0


def bare(stub: Any = None) -> Session:
    """Returns a session that has joined no server; the stub and the open calls are the test's."""
    session = Session.__new__(Session)
    session.address, session._lease, session._silent, session.failure = "host:1", 2.0, 4.0, None
    session._silence = Silence("host:1", 2.0, 4.0)
    session._left, session._explained = threading.Event(), threading.Event()
    session._failing, session._on_failure, session.waiting = threading.Lock(), [], Waiting()
    session.stop_after, session.draining = 0, False
    session._calls = MemberCalls(stub, 0, b"", session._silence, lambda: session.failure)
    session._stub = session._presence = session._channel = stub
    session._heartbeats = InsistentCalls()
    session.on_ring = lambda broken, newcomers: None
    return session


class Interrupted(list[Callable[[HubringError], None]]):
    """A list of callbacks to which one is added while the job fails."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.failing = threading.Thread(target=session._fail, args=(JobFailed("a shard is lost"),))

    def append(self, callback: Callable[[HubringError], None]) -> None:
        super().append(callback)
        self.failing.start()
        if not self._session._failing.locked():
            self.failing.join()


def test_a_callback_that_is_added_while_the_job_fails_is_called_once() -> None:
    session = bare()
    session._on_failure = callbacks = Interrupted(session)
    told: list[HubringError] = []
    session.on_failure(told.append)
    callbacks.failing.join()
    assert [str(error) for error in told] == ["a shard is lost"]


LOST = pb.HeartbeatReply(failed="shard 0 is lost", exit_code=69)


def beating(stub: Heartbeats, monkeypatch: pytest.MonkeyPatch) -> tuple[Session, list[float]]:
    """Returns a session that sends heartbeats without pauses, and the pauses that it would make."""
    session, pauses = bare(stub), list[float]()
    session.locations = ShardLocations(session._calls, ())
    monkeypatch.setattr(session, "_leaves", pauses.append)
    monkeypatch.setattr(session, "_beat", pb.HeartbeatRequest)
    return session, pauses


def test_a_heartbeat_that_failed_is_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Heartbeats([FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED), LOST])
    session, pauses = beating(stub, monkeypatch)
    session._keep_alive()
    assert stub.calls == 2
    assert pauses == [heartbeat_seconds(2.0), RETRY_SECONDS]


def test_a_worker_leaves_and_closes_while_a_heartbeat_waits_for_a_lost_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, _ = beating(stub := Heartbeats(), monkeypatch)
    session.step = 40
    session._admission = cast("Any", SimpleNamespace(shard=None))
    monkeypatch.setattr(session, "_leaves", lambda interval: session._left.is_set())
    session._thread = threading.Thread(target=session._keep_alive, daemon=True)
    session._thread.start()
    assert stub.unanswered.wait(SOON)
    session.leave(LeaveReason.FINISHED)
    session.await_end()
    assert session._thread.is_alive()
    session.close()
    assert not session._thread.is_alive()


def test_server_messages_are_stripped_before_a_log_or_error(caplog: pytest.LogCaptureFixture) -> None:
    red = "\x1b[31m"
    session = bare()
    session.locations = ShardLocations(session._calls, ())
    reply = pb.HeartbeatReply(
        news=[f"{red}rank 1 left"], slowest=f"{red}rank 2", finished=f"{red}over", failed=f"{red}lost"
    )
    assert not session._handle(reply)
    shown = [caplog.text, session.waiting.slowest, str(session.verdict()), session._finished]
    assert "rank 1 left" in shown[0]
    assert "\x1b" not in "".join(shown)
