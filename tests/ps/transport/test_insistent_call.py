"""A call without an answer is made once more, and the first answer counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from hubring.ps.transport.grpc.call_error import NoReply
from hubring.ps.transport.grpc.insistent_call import InsistentCalls, insist

SOON = 10.0


class Method:
    """A method whose calls are answered by the test, or by the calls after them."""

    def __init__(self) -> None:
        self.calls: list[Future[str]] = []

    def future(self, request: str, timeout: float) -> Future[str]:
        assert (request, timeout) == ("beat", 60.0)
        self.calls.append(Future())
        self.called(len(self.calls))
        return self.calls[-1]

    def called(self, count: int) -> None:
        """Does nothing."""


class Lossy(Method):
    """The first call is lost."""

    def called(self, count: int) -> None:
        if count == 2:
            self.calls[1].set_result("second")


class Slow(Method):
    """The server answers the first call after it got the second."""

    def called(self, count: int) -> None:
        if count == 2:
            self.calls[0].set_result("first")


class Broken(Method):
    """The second call shows that the connection is broken."""

    def called(self, count: int) -> None:
        if count == 2:
            self.calls[1].set_exception(ConnectionError("broken"))


class Quick(Method):
    """The first call is answered."""

    def called(self, count: int) -> None:
        self.calls[0].set_result("first")


def test_one_call_is_enough_if_it_is_answered() -> None:
    method = Quick()
    assert insist(method, "beat", 60.0, 60.0) == "first"
    assert len(method.calls) == 1


def test_a_call_that_is_lost_is_made_again() -> None:
    method = Lossy()
    assert insist(method, "beat", 0.0, 60.0) == "second"
    assert method.calls[0].cancelled()


def test_a_busy_server_may_answer_the_first_call() -> None:
    method = Slow()
    assert insist(method, "beat", 0.0, 60.0) == "first"
    assert method.calls[1].cancelled()


def test_a_broken_connection_shows_at_the_second_call() -> None:
    with pytest.raises(ConnectionError, match="broken"):
        insist(Broken(), "beat", 0.0, 60.0)


class Damaged(Method):
    """The replies lose their message, or do not."""

    def __init__(self, replies: Sequence[str | None]) -> None:
        super().__init__()
        self._replies: list[Any] = list(replies)

    def called(self, count: int) -> None:
        self.calls[-1].set_result(self._replies.pop(0))


def test_a_call_whose_reply_lost_its_message_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    assert insist(Damaged([None, "second"]), "beat", 60.0, 60.0) == "second"
    assert "the reply to a call was damaged on the wire; calling again" in caplog.text


def test_a_second_reply_without_a_message_fails_the_call() -> None:
    with pytest.raises(NoReply, match="the reply was damaged on the wire") as failed:
        insist(Damaged([None, None]), "beat", 60.0, 60.0)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


class Silent(Method):
    """The server does not answer. Tells when it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.was_called = threading.Event()

    def called(self, count: int) -> None:
        self.was_called.set()


def test_calls_in_flight_and_later_ones_end_when_they_are_not_needed() -> None:
    calls, method, failures = InsistentCalls(), Silent(), list[NoReply]()

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
