"""A failed call in words."""

from __future__ import annotations

import grpc

from hubring.ps.core.peer_text import MESSAGE, clean


def describe(error: grpc.RpcError) -> str:
    """Formats a failed call as `CODE: details`. The details come from the peer."""
    return f"{error.code().name}: {details(error)}"


def details(error: grpc.RpcError) -> str:
    """Returns the details of a failed call, on one line."""
    return clean(error.details() or "", MESSAGE)
