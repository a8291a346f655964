"""Adds a secret to every call of a gRPC channel."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc

from hubring.ps.security.guard import HEADER, SCHEME


class _Details(NamedTuple):
    """What gRPC asks of a call's details."""

    method: Any
    timeout: Any
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Signs the calls of a channel for threads."""

    def __init__(self, secret: str) -> None:
        self._header = (HEADER, SCHEME + secret)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._signed(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._signed(client_call_details), request)

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return continuation(self._signed(client_call_details), request_iterator)

    def _signed(self, details: Any) -> _Details:
        return _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._header],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )


class AsyncBearer(grpc.aio.UnaryUnaryClientInterceptor):
    """Signs the calls of a channel of an event loop."""

    def __init__(self, secret: str) -> None:
        self._header = (HEADER, SCHEME + secret)

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()), self._header)
        return await continuation(client_call_details._replace(metadata=metadata), request)
