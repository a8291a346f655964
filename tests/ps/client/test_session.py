"""What a session tells the threads that wait for data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.client.session import Session
from hubring.ps.client.shard_locations import ShardLocations
from hubring.ps.client.silence import Silence
from hubring.ps.core.errors import HubringError, JobFailed
from hubring.ps.core.waiting import Waiting
from hubring.ps.job.job import Reason
from hubring.ps.job.membership import RETRY_SECONDS, heartbeat_seconds
from hubring.ps.transport.grpc.insistent_call import InsistentCalls

SOON = 10.0


def bare(stub: Any = None) -> Session:
    """Returns a session that has joined no server; the stub and the open calls are the test's."""
    session = Session.__new__(Session)
    session.address, session._lease, session._silent, session.failure = "host:1", 2.0, 4.0, None
    session._silence = Silence("host:1", 2.0, 4.0)
    session._left, session._explained = threading.Event(), threading.Event()
    session._failing, session._on_failure, session.waiting = threading.Lock(), [], Waiting()
    session.stop_after, session.draining = 0, False
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


class Replies:
    """A stub and an open call. The first two replies lost their message, the third ends the job."""

    def __init__(self) -> None:
        self._replies = [None, None, pb.HeartbeatReply(failed="shard 0 is lost", exit_code=69)]

    @property
    def Heartbeat(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(future=self._call)

    def _call(self, request: pb.HeartbeatRequest, timeout: float) -> Future[pb.HeartbeatReply | None]:
        call: Future[pb.HeartbeatReply | None] = Future()
        call.set_result(self._replies.pop(0))
        return call

    def keep(self) -> None:
        """Does nothing."""


def test_a_heartbeat_is_repeated_after_replies_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    session = bare(Replies())
    session.locations = ShardLocations(session._stub, (0, b""), ())
    monkeypatch.setattr(session, "_leaves", lambda interval: False)
    monkeypatch.setattr(session, "_beat", pb.HeartbeatRequest)
    session._keep_alive()
    assert str(session.failure) == "shard 0 is lost"


class Losing(Replies):
    """As Replies, but the first heartbeat fails, and no reply loses its message."""

    def __init__(self) -> None:
        super().__init__()
        del self._replies[:2]
        self.calls = 0

    def _call(self, request: pb.HeartbeatRequest, timeout: float) -> Future[pb.HeartbeatReply | None]:
        self.calls += 1
        if self.calls > 1:
            return super()._call(request, timeout)
        lost: Future[pb.HeartbeatReply | None] = Future()
        lost.set_exception(Lost())
        return lost


class Lost(grpc.RpcError):
    """A call without an answer."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "no answer"


def test_a_heartbeat_that_failed_is_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session, pauses = bare(stub := Losing()), list[float]()
    session.locations = ShardLocations(session._stub, (0, b""), ())
    monkeypatch.setattr(session, "_leaves", pauses.append)
    monkeypatch.setattr(session, "_beat", pb.HeartbeatRequest)
    session._keep_alive()
    assert stub.calls == 2
    assert pauses == [heartbeat_seconds(2.0), RETRY_SECONDS]


class Acknowledging:
    """A stub that answers each request to leave, and no heartbeat; also a channel and an open call."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    @property
    def Heartbeat(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(future=self._call)

    def _call(self, request: pb.HeartbeatRequest, timeout: float) -> Future[pb.HeartbeatReply]:
        self.asked.set()
        return Future()

    def keep(self) -> None:
        """Does nothing."""

    def Leave(self, request: pb.LeaveRequest, timeout: float) -> pb.LeaveReply:  # noqa: N802
        return pb.LeaveReply()

    def close(self) -> None:
        """Does nothing."""


def test_a_worker_leaves_and_closes_while_a_heartbeat_waits_for_a_lost_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, admission = bare(stub := Acknowledging()), SimpleNamespace(shard=None)
    session.step, session._identity, session._admission = 40, (0, b""), cast("Any", admission)
    monkeypatch.setattr(session, "_leaves", lambda interval: session._left.is_set())
    monkeypatch.setattr(session, "_beat", pb.HeartbeatRequest)
    session._thread = threading.Thread(target=session._keep_alive, daemon=True)
    session._thread.start()
    assert stub.asked.wait(SOON)
    session.leave(Reason.FINISHED)
    session.await_end()
    assert session._thread.is_alive()
    session.close()
    assert not session._thread.is_alive()


def test_what_a_server_says_is_cleaned_before_it_is_logged_or_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    red = "\x1b[31m"
    session = bare()
    session.locations = ShardLocations(session._stub, (0, b""), ())
    reply = pb.HeartbeatReply(
        news=[f"{red}rank 1 left"], slowest=f"{red}rank 2", finished=f"{red}over", failed=f"{red}lost"
    )
    assert not session._handle(reply)
    shown = [caplog.text, session.waiting.slowest, str(session.verdict()), session._finished]
    assert "rank 1 left" in shown[0]
    assert "\x1b" not in "".join(shown)
