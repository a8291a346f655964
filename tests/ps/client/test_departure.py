"""A worker that finished insists on learning how its job ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.client import server_calls
from hubring.ps.client.server_calls import WorkerDeparture
from hubring.ps.core.errors import ConfigError, HubringError, JobFailed, NonFinite, ServerUnreachable
from tests.support.fakes.failed_call import FailedCall


class Server:
    """Answers Leave with these replies; None loses one. Counts the workers that confirm the last reply."""

    def __init__(self, replies: Sequence[pb.LeaveReply | None], *, stopped: bool = False) -> None:
        self.replies = list(replies)
        self.waits: list[float] = []
        self.confirmed = 0
        self._stopped = stopped

    def Leave(self, request: pb.LeaveRequest, timeout: float) -> pb.LeaveReply:  # noqa: N802
        if request.heard:
            self.confirmed += 1
            if self._stopped:
                raise FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED)
            return pb.LeaveReply()
        self.waits.append(request.wait_seconds)
        reply = self.replies.pop(0)
        if reply is None:
            raise FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED)
        return reply


class Shard:
    """The shard that the worker runs."""

    ended = ""

    def __str__(self) -> str:
        return "this worker's shard"


OVER = pb.LeaveReply()
WAITS = pb.LeaveReply(awaits="rank 1")


def leaving(server: Server, reason: str = "FINISHED", shard: Shard | None = None) -> WorkerDeparture:
    stub: Any = server
    child: Any = shard
    request = pb.LeaveRequest(reason=pb.LeaveRequest.Reason.Value(reason))
    return WorkerDeparture("hub:5555", stub, request, 90.0, 4.0, child)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_calls, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(server_calls, "patience", lambda *_: math.inf)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_calls, "patience", lambda *_: -1.0)


def test_a_lost_request_is_sent_again_until_the_job_is_over() -> None:
    server = Server([None, None, WAITS, None, WAITS, OVER])
    one = leaving(server)
    one.leave(insists=True)
    one.await_end()
    assert server.replies == []
    assert server.waits == [0.0] * 3 + [server_calls.HOLD_SECONDS] * 3
    assert server.confirmed == 1


def test_a_worker_that_knows_how_its_job_ended_needs_no_server_any_more() -> None:
    server = Server([WAITS, OVER], stopped=True)
    one = leaving(server)
    one.leave(insists=True)
    one.await_end()
    assert server.confirmed == 1


def test_a_server_that_is_lost_before_the_job_is_over_leaves_the_verdict_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient(monkeypatch)
    server = Server([WAITS, WAITS, None])
    one = leaving(server)
    one.leave(insists=True)
    with pytest.raises(ServerUnreachable):
        one.await_end()
    assert server.confirmed == 0


@pytest.mark.parametrize(("code", "kind"), [(1, NonFinite), (69, JobFailed), (78, ConfigError)])
def test_a_finished_worker_fails_as_its_job_does(code: int, kind: type[HubringError]) -> None:
    server = Server([WAITS, pb.LeaveReply(failed="no space left", exit_code=code)])
    one = leaving(server)
    one.leave(insists=True)
    with pytest.raises(kind, match="no space left"):
        one.await_end()
    assert server.confirmed == 1


def test_a_worker_that_failed_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([WAITS])
    one = leaving(server, "FAILED")
    one.leave(insists=True)
    one.await_end()
    assert server.replies == []
    impatient(monkeypatch)
    gone = leaving(Server([None]), "FAILED")
    gone.leave(insists=True)
    gone.await_end()


def test_a_worker_that_failed_serves_the_others_with_its_shard() -> None:
    server = Server([WAITS, WAITS, pb.LeaveReply(failed="the job failed", exit_code=69)])
    one = leaving(server, "FAILED", Shard())
    one.leave(insists=True)
    one.await_end()
    assert server.replies == []


def test_a_finished_worker_notices_that_its_shard_ended_before_the_job() -> None:
    shard = Shard()
    one = leaving(Server([WAITS, WAITS]), shard=shard)
    one.leave(insists=True)
    shard.ended = "was killed by signal 9"
    with pytest.raises(JobFailed, match="shard was killed by signal 9, before the job was over"):
        one.await_end()


def test_server_messages_are_stripped_of_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    red = "\x1b[31m"
    ends = pb.LeaveReply(news=[f"{red}rank 1 left"], failed=f"{red}the job failed", exit_code=69)
    leaves = leaving(Server([pb.LeaveReply(news=[f"{red}news"]), ends]))
    leaves.leave(insists=True)
    with pytest.raises(JobFailed, match="the job failed") as failure:
        leaves.await_end()
    assert "news" in caplog.text
    assert "\x1b" not in caplog.text + str(failure.value)
