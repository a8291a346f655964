"""A failed call in words, and for how long calls may fail like it."""

from __future__ import annotations

import grpc

from hubring.ps.core.peer_text import MESSAGE, clean


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
