from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from hubring.ps.client.server_calls import MemberCalls, Silence
from hubring.ps.core.errors import Fenced, HubringError, JobFailed, ServerUnreachable
from tests.support.fakes.failed_call import FailedCall


def fails(*codes: grpc.StatusCode) -> Callable[[str, float], str]:
    """Returns a call that fails with these codes first."""
    left = list(codes)

    def call(request: str, timeout: float) -> str:
        if left:
            raise FailedCall(left.pop(0))
        return f"an answer to {request}"

    return call


def calls(patience: float, failure: HubringError | None = None) -> MemberCalls:
    stub: Any = None
    return MemberCalls(stub, 0, b"", Silence("hub:5555", 90.0, patience), lambda: failure)


OUT_OF_REACH, LATE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
LOST = JobFailed("a shard is lost")


def test_a_call_is_repeated_until_a_standby_answers() -> None:
    assert calls(60.0).make(fails(OUT_OF_REACH, OUT_OF_REACH), "a plan", 1.0) == "an answer to a plan"


@pytest.mark.parametrize(
    ("codes", "patience", "failure", "error", "words"),
    [
        ([OUT_OF_REACH] * 10, 0.0, None, ServerUnreachable, r"not answered .* \(UNAVAILABLE: why\)"),
        ([LATE], 60.0, None, ServerUnreachable, r"not answered .* \(DEADLINE_EXCEEDED: why\)"),
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
        calls(patience, failure).make(fails(*codes), "a plan", 1.0)
