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


def gone(error: grpc.RpcError) -> HubringError:
    return ServerUnreachable(f"gone after {error.code().name}")


OUT_OF_REACH, LATE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
LOST = JobFailed("a shard is lost")


def test_a_call_is_repeated_until_a_standby_answers() -> None:
    assert repeated(fails(OUT_OF_REACH, OUT_OF_REACH), 60.0, lambda: None, gone) == "an answer"


@pytest.mark.parametrize(
    ("codes", "patience", "failure", "error", "words"),
    [
        ([OUT_OF_REACH] * 10, 0.0, None, ServerUnreachable, "gone after UNAVAILABLE"),
        ([LATE], 60.0, None, ServerUnreachable, "gone after DEADLINE_EXCEEDED"),
        ([OUT_OF_REACH], 60.0, LOST, JobFailed, "a shard is lost"),
        ([grpc.StatusCode.PERMISSION_DENIED], 60.0, None, Fenced, "why"),
    ],
)
def test_a_call_is_repeated_neither_for_ever_nor_if_the_server_answers_late_nor_in_vain(
    codes: list[grpc.StatusCode],
    patience: float,
    failure: HubringError | None,
    error: type[HubringError],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        repeated(fails(*codes), patience, lambda: failure, gone)
