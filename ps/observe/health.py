"""grpc.health.v1 for each service of a hub and of a shard, and the probe that container health checks run.

Law: a service is SERVING if and only if nothing blocks it. The protocol has no field for the reason, so
the reply to Check carries it as trailing metadata. A client that ignores the metadata sees a plain
NOT_SERVING.

There is no Watch: it would keep a stream and a name for each caller, and any program may call.

Law: a probe's caller has no token, and may be any client. A probe takes memory until its message has come
and its reply was read, and both may never happen. So few probes wait for their message, and a further one
ends the oldest. The message of an honest caller comes with the call: on an event loop no probe ends
before there was time to read it. Nothing ends a reply there that its caller does not read, so a
connection has few probes, and all together have a limit.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hubring.protos import control_pb2 as pb
from hubring.protos import data_pb2
from hubring.ps.config.values import address as split
from hubring.ps.core.bounds import clean_message
from hubring.ps.core.errors import HubringError, ServerUnreachable, UsageError
from hubring.ps.security.access import unproved_access
from hubring.ps.security.certificate import NO_CERTIFICATE, OwnCertificate
from hubring.ps.security.guard import in_threads
from hubring.ps.transport.grpc.calls import describe
from hubring.ps.transport.grpc.channel import open_channel

MESSAGE_BYTES = 1024
"""Maximum bytes of a probe's message: the name of a service."""

MOST_WAITING = 2
"""Probes that wait for their message, which may have up to 8 MiB, as the port also serves members."""

PROBE_TURN_SECONDS = 0.02
"""How long a probe may wait for its message while others wait for their turn."""

CONNECTION_OPEN = 4
"""Maximum number of probes of one connection: one for each service."""

MOST_OPEN = 1024
"""The same for all connections. Each takes 23 kB until its caller has read the reply."""


class ProbeRefused(Exception):
    """A probe that gets no answer: the code and the text of its end."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class WaitingProbes:
    """The probes that end if too many others come. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[Callable[[], object], None] = {}

    def enter(self, end: Callable[[], object]) -> None:
        """Adds a probe.

        Args:
            end: Ends it, without blocking; called if it is the oldest one of too many.
        """
        with self._lock:
            self._ends[end] = None
            is_full = len(self._ends) > MOST_WAITING
        if is_full:
            self.end_oldest()

    def end_oldest(self) -> None:
        """Ends the oldest probe, if there is one."""
        with self._lock:
            oldest = next(iter(self._ends), None)
            if oldest is not None:
                del self._ends[oldest]
        if oldest is not None:
            oldest()

    def leave(self, end: Callable[[], object]) -> None:
        """Removes a probe, if it is still there."""
        with self._lock:
            self._ends.pop(end, None)


class ProbeTurns:
    """Lets few probes of an event loop read their message at once, or gRPC would receive all of them.

    A turn ends after TURN_SECONDS if others wait for theirs.

    Args:
        waiting: Those that have had their time, but whose message has not come.
    """

    def __init__(self, waiting: WaitingProbes) -> None:
        self._waiting = waiting
        self._free = asyncio.Semaphore(MOST_WAITING)
        self._queued = 0

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the body."""
        self._queued += 1
        try:
            if self._free.locked():
                self._waiting.end_oldest()
            await self._free.acquire()
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._free.release()

    async def use(self, work: asyncio.Future[object]) -> None:
        """Waits for what is done in a turn; cancels it if that takes too long while others wait."""
        for _ in range(2):  # on a busy loop one wait can end late, at the same time as the work
            await asyncio.wait([work], timeout=PROBE_TURN_SECONDS / 2)
        if work.done():
            return
        self._waiting.enter(work.cancel)
        try:
            if self._queued:
                self._waiting.end_oldest()
            await asyncio.wait([work])
        finally:
            self._waiting.leave(work.cancel)


class OpenProbes:
    """The probes that are not over: their message has not come, or their reply was not read."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, connection: str) -> Callable[[object], None]:
        """Counts a probe. Returns what removes it again.

        Args:
            connection: The address and port of its caller, as gRPC names them.

        Raises:
            Refused: This connection, or all together, have too many.
        """
        if self._counts[connection] >= CONNECTION_OPEN or self._counts.total() >= MOST_OPEN:
            raise ProbeRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many other probes are not over")
        self._counts[connection] += 1

        def remove(_: object) -> None:
            self._counts -= Counter([connection])  # without zeros

        return remove


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
        self._waiting = WaitingProbes()

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
            raise ProbeRefused(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be read") from error
        if service not in self._why:
            raise ProbeRefused(grpc.StatusCode.NOT_FOUND, "there is no such service here")
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
        self._turns = ProbeTurns(self._waiting)
        self._open = OpenProbes()

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
            except ProbeRefused as error:
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
            text = "other probes came before the call's message"
            raise ProbeRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
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
            except ProbeRefused as error:
                context.abort(error.code, error.text)
            return answer

        return serve


def _checked(message: bytes | None) -> bytes:
    if message is None:
        raise ProbeRefused(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
    if len(message) > MESSAGE_BYTES:
        text = f"the message has {len(message)} bytes; the maximum is {MESSAGE_BYTES}"
        raise ProbeRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    return message


def _answer(why: str) -> Any:
    answer = health_pb2.HealthCheckResponse
    return answer(status=answer.NOT_SERVING if why else answer.SERVING)


PATIENCE = 3.0
"""Seconds. Shorter than the probe timeout of every engine except Kubernetes' default of 1."""

SERVING = health_pb2.HealthCheckResponse.SERVING


def probe(
    address: str, service: str, timeout: float = PATIENCE, own: OwnCertificate = NO_CERTIFICATE
) -> None:
    """Returns if the service is serving.

    Args:
        address: `HOST:PORT` of a hub's control, or of a shard's gRPC.
        service: The service's name in grpc.health.v1; empty for the whole process.
        timeout: Seconds.
        own: This program's certificate, which a server with an authority asks for.

    Raises:
        ConfigError: The address is invalid.
        UsageError: There is no such service.
        ServerUnreachable: The service is not serving (the message gives the reason), or no server answers.
    """
    split(address)
    request = health_pb2.HealthCheckRequest(service=service)
    with open_channel(address, unproved_access(address, timeout, own)) as channel:
        try:
            answer, call = health_pb2_grpc.HealthStub(channel).Check.with_call(request, timeout=timeout)
        except grpc.RpcError as error:
            raise _refused(address, service, error) from error
    if answer.status != SERVING:
        name = service or "the process"
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise ServerUnreachable(f"{name} at {address} is {status}: {_why(call.trailing_metadata())}")


def _refused(address: str, service: str, error: Any) -> HubringError:
    code = error.code()
    if code is grpc.StatusCode.NOT_FOUND:
        known = f"a hub has {CONTROL}, {DATA} and {READY}, a shard has {SHARD_CONTROL} and {DATA}"
        fix = "name one of these, or none to check the process"
        return UsageError(f"{address} has no service {service!r}: {known}; {fix}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ServerUnreachable(f"the server at {address} is neither a hub nor a shard; check the port")
    return ServerUnreachable(
        f"no server answers at {address} ({describe(error)});"
        " check the address, or start a hub there: ps-server start"
    )


def _why(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == WHY and isinstance(value, bytes):
            return clean_message(value.decode(errors="replace"))
    return "the server gives no reason"
