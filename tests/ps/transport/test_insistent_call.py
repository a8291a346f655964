"""A call without an answer is made once more, and the first answer counts."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.transport.grpc.calls import InsistentCalls, NoReply, describe, patience
from tests.support.fakes.failed_call import FailedCall

SOON = 10.0


Answer = tuple[int, str | Exception | None]


class Method:
    """A method of a server; `answers` says which call gets what after each call, if any does."""

    def __init__(self, *answers: Answer | None) -> None:
        self.calls: list[Future[str | None]] = []
        self.was_called = threading.Event()
        self._answers = answers

    def future(self, request: str, timeout: float) -> Future[Any]:
        assert (request, timeout) == ("beat", 60.0)
        self.calls.append(Future())
        self.was_called.set()
        answer = self._answers[len(self.calls) - 1]
        if answer is not None:
            number, what = answer
            if isinstance(what, Exception):
                self.calls[number].set_exception(what)
            else:
                self.calls[number].set_result(what)
        return self.calls[-1]


@pytest.mark.parametrize(
    ("answers", "after", "expected", "cancelled"),
    [
        ([(0, "first")], 60.0, "first", []),
        ([None, (1, "second")], 0.0, "second", [0]),
        ([None, (0, "first")], 0.0, "first", [1]),  # of a busy server
    ],
)
def test_a_call_without_an_answer_is_made_once_more_and_the_first_answer_counts(
    answers: list[Answer | None], after: float, expected: str, cancelled: list[int]
) -> None:
    method = Method(*answers)
    assert InsistentCalls().make(method, "beat", after, 60.0) == expected
    assert [number for number, call in enumerate(method.calls) if call.cancelled()] == cancelled
    assert len(method.calls) == len(answers)


def test_a_broken_connection_shows_at_the_second_call() -> None:
    with pytest.raises(ConnectionError, match="broken"):
        InsistentCalls().make(Method(None, (1, ConnectionError("broken"))), "beat", 0.0, 60.0)


def test_a_call_whose_reply_lost_its_message_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    assert InsistentCalls().make(Method((0, None), (1, "second")), "beat", 60.0, 60.0) == "second"
    assert "the reply to a call was damaged on the wire; calling again" in caplog.text


def test_a_second_reply_without_a_message_fails_the_call() -> None:
    with pytest.raises(NoReply, match="the reply was damaged on the wire") as failed:
        InsistentCalls().make(Method((0, None), (1, None)), "beat", 60.0, 60.0)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


def test_calls_in_flight_and_later_ones_end_when_they_are_not_needed() -> None:
    calls, method, failures = InsistentCalls(), Method(None), list[NoReply]()

    def make() -> None:
        with pytest.raises(NoReply) as failed:
            calls.make(method, "beat", 60.0, 60.0)
        failures.append(failed.value)

    thread = threading.Thread(target=make)
    thread.start()
    assert method.was_called.wait(SOON)
    calls.end()
    thread.join(SOON)
    make()
    assert [failure.code() for failure in failures] == [grpc.StatusCode.CANCELLED] * 2
    assert len(method.calls) == 1
    assert method.calls[0].cancelled()


def test_the_details_of_a_failed_call_are_cleaned() -> None:
    failed = FailedCall(grpc.StatusCode.UNAVAILABLE, "\x1b[31mno\nserver")
    assert describe(failed) == "UNAVAILABLE: \N{REPLACEMENT CHARACTER}no\N{REPLACEMENT CHARACTER}server"


def test_a_process_that_listens_and_does_not_shake_hands_may_be_stopped_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        soon = [("grpc.min_reconnect_backoff_ms", 100)]
        channel = grpc.secure_channel(place, grpc.ssl_channel_credentials(), options=soon)
        with channel, pytest.raises(grpc.RpcError) as failed:
            ControlStub(channel).Clock(pb.ClockRequest(), timeout=SOON)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert patience(failed.value, 90.0, 4.0) == 90.0
