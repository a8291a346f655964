"""A worker tells a server that is gone from its own absence."""

from __future__ import annotations

import grpc

from hubring.ps.client.server_calls import Silence
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.job.membership import SILENT_SECONDS
from tests.support.fakes.clock import FakeTime
from tests.support.fakes.failed_call import FailedCall

LEASE = 90.0


GONE = FailedCall(grpc.StatusCode.UNAVAILABLE)
STOPPED = FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED)


def test_a_stopped_server_gets_the_lease_and_one_that_is_gone_does_not() -> None:
    time = FakeTime()
    quiet = Silence("hub:5555", LEASE, SILENT_SECONDS, time)
    time.advance(SILENT_SECONDS + 1.0)
    assert quiet.meaning(STOPPED) is None
    assert isinstance(quiet.meaning(GONE), ServerUnreachable)
    time.advance(LEASE)
    assert isinstance(quiet.meaning(STOPPED), ServerUnreachable)
