"""Asks a hub or a shard by grpc.health.v1 whether it serves. Container health checks run it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hubring.ps.config.address import address as split
from hubring.ps.core.errors import HubringError, ServerUnreachable, UsageError
from hubring.ps.core.peer_text import clean_message
from hubring.ps.observe.health import CONTROL, DATA, READY, SHARD_CONTROL, WHY
from hubring.ps.security.access import unproved
from hubring.ps.security.own_certificate import NOTHING, Own
from hubring.ps.transport.grpc.call_error import describe
from hubring.ps.transport.grpc.channel import open_channel

PATIENCE = 3.0
"""Seconds. Shorter than the probe timeout of every engine except Kubernetes' default of 1."""

SERVING = health_pb2.HealthCheckResponse.SERVING


def probe(address: str, service: str, timeout: float = PATIENCE, own: Own = NOTHING) -> None:
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
    with open_channel(address, unproved(address, timeout, own)) as channel:
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
