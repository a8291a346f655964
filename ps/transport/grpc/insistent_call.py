"""A call that is sent once more if no answer comes: a message can be lost on a connection that lives on.

Law: the first call goes on meanwhile, as the server may only be busy. So the method must be one that may be
called twice. A reply that was damaged on the wire is no answer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from hubring.ps.transport.grpc.call_error import NoReply, whole

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


def insist(method: Any, request: Any, after: float, timeout: float) -> Any:
    """As `InsistentCalls.make`, for a call that no other thread ends."""
    return InsistentCalls().make(method, request, after, timeout)


def _is_damaged(call: Any) -> bool:
    """Whether a call that is done succeeded without a message."""
    damaged = not call.cancelled() and call.exception() is None and call.result() is None
    if damaged:
        log.warning("the reply to a call was damaged on the wire; calling again")
    return damaged


def _ended() -> NoReply:
    return NoReply(grpc.StatusCode.CANCELLED, "this process has ended its calls")
