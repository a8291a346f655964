"""grpc.health.v1 for each service of a hub and of a shard.

Law: a service is SERVING if and only if nothing blocks it. The protocol has no field for
the reason, so the reply to Check carries it as trailing metadata. A client that ignores
the metadata sees a plain NOT_SERVING.

There is no Watch: it would keep a stream and a name for each caller, and any program may call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from hubring.protos import control_pb2 as pb
from hubring.protos import data_pb2
from hubring.ps.observe.probes import MESSAGE_BYTES, MOST_WAITING, Open, Refused, Turns, Waiting
from hubring.ps.security.guard import in_threads

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

PROCESS = ""
"""The whole process, as in every gRPC server."""
CONTROL = pb.DESCRIPTOR.services_by_name["Control"].full_name
SHARD_CONTROL = pb.DESCRIPTOR.services_by_name["ShardControl"].full_name
DATA = data_pb2.DESCRIPTOR.services_by_name["Data"].full_name
"""On a shard: it accepts pushes. On a hub: every shard that a job needs is alive."""
READY = "ready"
"""On a hub only: a new worker can join."""

WHY = "hubring-why-bin"
"""Key of the trailing metadata. The value is UTF-8, since names of hosts and jobs can have any characters."""

WHY_BYTES = 2000
"""Bytes of the reason to send. gRPC refuses metadata above 8 KiB, and a failure can hold a traceback."""

Troubles = Mapping[str, str]
"""For each service the reason why it does not serve, as a clause; empty if it serves."""


class _Health:
    """What the probes of one server learn. Any thread may call it."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}
        self._waiting = Waiting()

    def tell(self, troubles: Troubles) -> None:
        """Updates the services' states."""
        self._why.update(troubles)

    def _add(self, server: Any, kind: Any, serve: Any) -> None:
        """Registers methods that wait for their message themselves, since it may never come.

        Args:
            server: Has not started.
            kind: Makes a method handler of a behavior.
            serve: Makes a behavior of a function from message to reply.
        """
        replies = {"Check": self._check, "List": self._list}
        methods = {name: kind(serve(reply)) for name, reply in replies.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def _check(self, message: bytes, context: Any) -> bytes:
        try:
            service = health_pb2.HealthCheckRequest.FromString(message).service
        except DecodeError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be read") from error
        if service not in self._why:
            raise Refused(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        if why := self._why[service]:
            context.set_trailing_metadata(((WHY, why.encode()[:WHY_BYTES]),))
        return bytes(_answer(why).SerializeToString())

    def _list(self, message: bytes, context: Any) -> bytes:
        statuses = {service: _answer(why) for service, why in self._why.items()}
        return bytes(health_pb2.HealthListResponse(statuses=statuses).SerializeToString())


class HubHealth(_Health):
    """Health of a hub, for a server of an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns(self._waiting)
        self._open = Open()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service on a server that has not started."""
        self._add(server, grpc.stream_stream_rpc_method_handler, self._serve)

    def _serve(self, reply: Any) -> Any:
        async def serve(requests: object, context: Any) -> None:
            refusal = None
            try:
                context.add_done_callback(self._open.add(context.peer()))
                async with self._turns.take():
                    answer: bytes = reply(_checked(await self._message(context)), context)
            except Refused as error:
                refusal = context.abort(error.code, error.text)
            if refusal is not None:
                await refusal  # may never end: so without a turn, and without an error that holds the message
            try:
                await context.write(answer)
            except grpc.aio.InternalError as error:  # the caller has gone; gRPC would log a traceback
                raise asyncio.CancelledError from error

        return serve

    async def _message(self, context: Any) -> bytes | None:
        """Returns a probe's message, or None if it has none.

        Raises:
            Refused: Too many other probes came meanwhile.
        """
        reading = asyncio.ensure_future(context.read())
        try:
            await self._turns.use(reading)
        finally:
            reading.cancel()
        if reading.cancelled():
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "other probes came before the call's message")
        message = reading.result()
        return message if isinstance(message, bytes) else None


class ShardHealth(_Health):
    """Health of a shard, for a server with threads."""

    def __init__(self) -> None:
        super().__init__()
        # One thread more than can wait: it ends the oldest probe.
        self._threads = ThreadPoolExecutor(MOST_WAITING + 1, thread_name_prefix="grpc probe")

    def add_to(self, server: grpc.Server) -> None:
        """Registers the service on a server that has not started."""

        def serve(reply: Any) -> Any:
            return in_threads(self._serve(reply), self._threads)

        self._add(server, grpc.stream_unary_rpc_method_handler, serve)  # sends without a thread

    def _serve(self, reply: Any) -> Any:
        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            self._waiting.enter(context.cancel)  # until the caller has its reply
            if not context.add_callback(lambda: self._waiting.leave(context.cancel)):
                self._waiting.leave(context.cancel)
            try:
                answer: bytes = reply(_checked(next(requests, None)), context)
            except Refused as error:
                context.abort(error.code, error.text)
            return answer

        return serve


def _checked(message: bytes | None) -> bytes:
    if message is None:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
    if len(message) > MESSAGE_BYTES:
        text = f"the message has {len(message)} bytes; the maximum is {MESSAGE_BYTES}"
        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    return message


def _answer(why: str) -> Any:
    answer = health_pb2.HealthCheckResponse
    return answer(status=answer.NOT_SERVING if why else answer.SERVING)
