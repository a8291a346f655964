from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from hubring.ps.client.server_calls import repeated
from hubring.ps.core.errors import Fenced, HubringError, JobFailed, ServerUnreachable
from tests.support.fakes.failed_call import FailedCall


def fails(*codes: grpc.StatusCode) -> Callable[[], str]:
    """Returns a call that fails with these codes first."""
    left = list(codes)

    def call() -> str:
        if left:
            raise FailedCall(left.pop(0))
        return "an answer"

    return call


def none() -> HubringError | None:
    return None


def gone(error: grpc.RpcError) -> HubringError:
    return ServerUnreachable(f"gone after {error.code().name}")


OUT_OF_REACH = grpc.StatusCode.UNAVAILABLE


def test_a_call_is_repeated_until_a_standby_answers() -> None:
    assert repeated(fails(OUT_OF_REACH, OUT_OF_REACH), 60.0, none, gone) == "an answer"


def test_a_server_that_stays_out_of_reach_is_gone() -> None:
    with pytest.raises(ServerUnreachable, match="gone after UNAVAILABLE"):
        repeated(fails(*[OUT_OF_REACH] * 10), 0.0, none, gone)


def test_a_server_that_answers_late_is_not_asked_again() -> None:
    with pytest.raises(ServerUnreachable, match="gone after DEADLINE_EXCEEDED"):
        repeated(fails(grpc.StatusCode.DEADLINE_EXCEEDED), 60.0, none, gone)


def test_a_worker_that_cannot_continue_asks_no_more() -> None:
    with pytest.raises(JobFailed, match="a shard is lost"):
        repeated(fails(OUT_OF_REACH), 60.0, lambda: JobFailed("a shard is lost"), gone)


def test_a_worker_that_lost_its_place_is_told_so() -> None:
    with pytest.raises(Fenced, match="why"):
        repeated(fails(grpc.StatusCode.PERMISSION_DENIED), 60.0, none, gone)
