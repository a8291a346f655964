"""A call without an answer is made once more, and the first answer counts."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from hubring.ps.transport.grpc.insistent_call import insist


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
