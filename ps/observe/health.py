"""grpc.health.v1 for the services of a hub, and the probe that container health checks run.

Law: a service is SERVING if and only if nothing blocks it. The protocol has no field for the reason, so
the reply to Check carries it as trailing metadata. A client that ignores the metadata sees a plain
NOT_SERVING.

There is no Watch: it would keep a stream for each caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hubring.protos import control_pb2 as pb
from hubring.protos import data_pb2
from hubring.ps.core.bounds import clean_message
from hubring.ps.core.errors import ServerUnreachable, UsageError

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

PROCESS = ""
"""The whole process, as in every gRPC server."""
CONTROL = pb.DESCRIPTOR.services_by_name["Control"].full_name
DATA = data_pb2.DESCRIPTOR.services_by_name["Data"].full_name
"""Every shard that a job needs is alive."""
READY = "ready"
"""A new worker can join."""

WHY = "hubring-why-bin"
"""Key of the trailing metadata. The value is UTF-8, since names of hosts and jobs can have any characters."""

WHY_BYTES = 2000
"""Bytes of the reason to send. gRPC refuses metadata above 8 KiB, and a failure can hold a traceback."""

Troubles = Mapping[str, str]
"""For each service the reason why it does not serve, as a clause; empty if it serves."""


class HubHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """What the probes of a hub learn."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def tell(self, troubles: Troubles) -> None:
        """Updates the services' states."""
        self._why.update(troubles)

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._why:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        if why := self._why[request.service]:
            context.set_trailing_metadata(((WHY, why.encode()[:WHY_BYTES]),))
        return _answer(why)

    async def List(self, request: Any, context: Any) -> Any:
        statuses = {service: _answer(why) for service, why in self._why.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


def _answer(why: str) -> Any:
    answer = health_pb2.HealthCheckResponse
    return answer(status=answer.NOT_SERVING if why else answer.SERVING)


PATIENCE = 3.0
"""Seconds. Shorter than the probe timeout of every engine except Kubernetes' default of 1."""

SERVING = health_pb2.HealthCheckResponse.SERVING


def probe(channel: grpc.Channel, address: str, service: str, timeout: float = PATIENCE) -> None:
    """Returns if the service is serving.

    Args:
        channel: Connected to a hub's control port.
        address: The hub's, for messages.
        service: The service's name in grpc.health.v1; empty for the whole process.
        timeout: Seconds.

    Raises:
        UsageError: There is no such service.
        ServerUnreachable: The service is not serving (the message gives the reason), or it is no hub.
        grpc.RpcError: No hub answers.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer, call = health_pb2_grpc.HealthStub(channel).Check.with_call(request, timeout=timeout)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise UsageError(
                f"{address} has no service {service!r}: a hub has {CONTROL}, {DATA} and {READY}; name one of"
                " these, or none to check the process"
            ) from error
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ServerUnreachable(f"the server at {address} is no hub; check the port") from error
        raise
    if answer.status != SERVING:
        name = service or "the process"
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise ServerUnreachable(f"{name} at {address} is {status}: {_why(call.trailing_metadata())}")


def _why(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == WHY and isinstance(value, bytes):
            return clean_message(value.decode(errors="replace"))
    return "the server gives no reason"
