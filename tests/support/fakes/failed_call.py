"""A call to a server that failed."""

from __future__ import annotations

import grpc


class FailedCall(grpc.RpcError):
    """What gRPC raises for it; the peer sent the details."""

    def __init__(self, code: grpc.StatusCode, details: str = "why") -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details
