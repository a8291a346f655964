"""A worker tells a server that is gone from its own absence."""

from __future__ import annotations

import grpc

from hubring.ps.client.silence import Silence
from hubring.ps.core.errors import Fenced, ServerUnreachable
from hubring.ps.job.membership import SILENT_SECONDS
from tests.support.fakes.clock import FakeTime

LEASE = 90.0


class Failed(grpc.RpcError):
    """A call that failed."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "refused"


GONE = Failed(grpc.StatusCode.UNAVAILABLE)
STOPPED = Failed(grpc.StatusCode.DEADLINE_EXCEEDED)


def test_a_stopped_server_gets_the_lease_and_one_that_is_gone_does_not() -> None:
    time = FakeTime()
    quiet = Silence("hub:5555", LEASE, SILENT_SECONDS, time)
    time.advance(SILENT_SECONDS + 1.0)
    assert quiet.meaning(STOPPED) is None
    assert isinstance(quiet.meaning(GONE), ServerUnreachable)
    time.advance(LEASE)
    assert isinstance(quiet.meaning(STOPPED), ServerUnreachable)


def test_a_worker_that_was_suspended_asks_again_and_then_blames_nobody_else() -> None:
    time = FakeTime()
    quiet = Silence("hub:5555", 2.0, SILENT_SECONDS, time)
    with quiet.pauses.within(1.0):
        time.advance(12.0)
    assert quiet.meaning(GONE) is None
    time.advance(SILENT_SECONDS + 1.0)
    found = quiet.meaning(GONE)
    assert isinstance(found, Fenced)
    assert isinstance(quiet.gone(GONE), Fenced)
    assert "suspended for about 12 s, longer than its lease of 2 s" in str(found)
    quiet.end()
    time.advance(SILENT_SECONDS + 1.0)
    assert isinstance(quiet.meaning(GONE), ServerUnreachable)
