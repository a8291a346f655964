"""Calls to a server: their errors, a repetition of those without an answer, and one that stays open.

A call is sent once more if no answer comes: a message can be lost on a connection that lives on. A call stays
open for as long as a process lives, so that its server notices when the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import grpc

from hubring.ps.core.bounds import MESSAGE_CHARACTERS, clean

_T = TypeVar("_T")


class NoReply(grpc.RpcError):
    """A call without a reply, for a reason that this process knows."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return str(self)


def whole(reply: _T | None) -> _T:
    """Returns the reply of a call that succeeded.

    Raises:
        NoReply: It has none, because it was damaged on a wire without TLS. Calling again helps.
    """
    if reply is None:
        raise NoReply(grpc.StatusCode.UNAVAILABLE, "the reply was damaged on the wire")
    return reply


def describe(error: grpc.RpcError) -> str:
    """Formats a failed call as `CODE: details`. The details come from the peer."""
    return f"{error.code().name}: {details(error)}"


STALLED = "Handshake read failed (Endpoint closing)"
"""In gRPC's words for a process that listens and does not shake hands in time. It is stopped or busy."""


def patience(error: grpc.RpcError, stopped_seconds: float, refusing_seconds: float) -> float:
    """Returns for how many seconds calls may fail like this.

    Args:
        error: The failed call.
        stopped_seconds: How long a process that is stopped or busy may take to recover; at least
            `refusing_seconds` count. Calls to it time out.
        refusing_seconds: How long a process that has ended may take to be replaced.
    """
    timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or STALLED in (error.details() or "")
    return max(stopped_seconds, refusing_seconds) if timed_out else refusing_seconds


def details(error: grpc.RpcError) -> str:
    """Returns the details of a failed call, on one line."""
    return clean(error.details() or "", MESSAGE_CHARACTERS)


log = logging.getLogger(__name__)


class InsistentCalls:
    """The calls of one thread, which another thread can end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Any] = []
        self._ended = False

    def make(self, method: Any, request: Any, after: float, timeout: float) -> Any:
        """Calls a method, and once more if there is no answer; returns the first answer.

        Args:
            method: A unary method of a stub.
            request: Its argument.
            after: Seconds from the first call to the second.
            timeout: Seconds that each of the calls may take.

        Raises:
            grpc.RpcError: A call failed, before any was answered.
        """
        answers: SimpleQueue[Any] = SimpleQueue()
        answer = None
        try:
            self._begin(method, request, timeout, answers)
            with contextlib.suppress(Empty):
                answer = answers.get(timeout=after)
            if answer is None or _is_damaged(answer):
                self._begin(method, request, timeout, answers)
                answer = answers.get()
        finally:
            self._cancel()
        if answer.cancelled():
            raise _ended()
        return whole(answer.result())

    def end(self) -> None:
        """Ends the calls in flight, and those to come; from any thread."""
        with self._lock:
            self._ended = True
        self._cancel()

    def _begin(self, method: Any, request: Any, timeout: float, answers: SimpleQueue[Any]) -> None:
        with self._lock:
            if self._ended:
                raise _ended()
            call = method.future(request, timeout=timeout)
            self._calls.append(call)
        call.add_done_callback(answers.put)

    def _cancel(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call.cancel()  # does nothing to a call that has an answer


def _is_damaged(call: Any) -> bool:
    """Whether a call that is done succeeded without a message."""
    damaged = not call.cancelled() and call.exception() is None and call.result() is None
    if damaged:
        log.warning("the reply to a call was damaged on the wire; calling again")
    return damaged


def _ended() -> NoReply:
    return NoReply(grpc.StatusCode.CANCELLED, "this process has ended its calls")


class OpenCall:
    """Keeps one call open.

    Args:
        start: Starts the call, and does not wait.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._call: Any = None

    def keep(self) -> None:
        """Starts the call, or starts it again if it has ended."""
        if self._call is None or not self._call.is_active():
            self._call = self._start()

    def close(self) -> None:
        """Ends the call."""
        if self._call is not None:
            self._call.cancel()
