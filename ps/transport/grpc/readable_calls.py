"""Refuses calls whose message cannot be read, since gRPC would print a traceback for each."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from hubring.ps.core.rejections import Rejections

log = logging.getLogger(__name__)

TEXT = "the call's message cannot be read: it was damaged on its way; call again"


class ReadableCalls(grpc.aio.ServerInterceptor):
    """Ends such calls of a server of an event loop with DATA_LOSS; counts and logs them.

    It leaves alone calls that send a stream of messages, or whose method returns no iterator of replies.
    """

    def __init__(self, rejections: Rejections) -> None:
        self._rejections = rejections

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        handler = await continuation(call)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        reads = handler._replace(request_deserializer=_tolerant(handler.request_deserializer))
        if handler.unary_unary is not None:
            return reads._replace(unary_unary=self._one_reply(handler.unary_unary, call.method))
        if inspect.isasyncgenfunction(handler.unary_stream):
            return reads._replace(unary_stream=self._replies(handler.unary_stream, call.method))
        return handler

    def _one_reply(self, method: Callable[[Any, Any], Awaitable[Any]], name: str) -> Any:
        async def reply(request: Any, context: Any) -> Any:
            await self._check(request, context, name)
            return await method(request, context)

        return reply

    def _replies(self, method: Callable[[Any, Any], AsyncIterator[Any]], name: str) -> Any:
        async def replies(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(request, context, name)
            async for each in method(request, context):
                yield each

        return replies

    async def _check(self, request: Any, context: Any, name: str) -> None:
        if isinstance(request, DecodeError):
            self._rejections.add("message", log, f"refused a call of {name}: its message cannot be read")
            await context.abort(grpc.StatusCode.DATA_LOSS, TEXT)


def _tolerant(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a deserializer that returns the error in place of a message that cannot be read."""

    def deserialize(content: bytes) -> Any:
        try:
            return read(content)
        except DecodeError as error:
            return error

    return deserialize
