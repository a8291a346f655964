"""A failed call in words, for how long calls may fail like it, and calls that succeed without a reply."""

from __future__ import annotations

from typing import TypeVar

import grpc

from hubring.ps.core.peer_text import MESSAGE, clean

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


def patience(error: grpc.RpcError, stopped_seconds: float, refusing_seconds: float) -> float:
    """Returns for how many seconds calls may fail like this.

    Args:
        error: The failed call.
        stopped_seconds: How long a process that is stopped or busy may take to recover; at least
            `refusing_seconds` count. Calls to it time out.
        refusing_seconds: How long a process that has ended may take to be replaced.
    """
    timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return max(stopped_seconds, refusing_seconds) if timed_out else refusing_seconds


def details(error: grpc.RpcError) -> str:
    """Returns the details of a failed call, on one line."""
    return clean(error.details() or "", MESSAGE)
