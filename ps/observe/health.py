"""Health: grpc.health.v1 for each service of a hub, and of a shard.

Law: a service is serving if and only if nothing is in its way. What is, goes
with the answer to Check as trailing metadata, since the protocol has no word
for it; who does not know of that sees a plain NOT_SERVING.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from hubring.protos import control_pb2 as pb
from hubring.protos import data_pb2

PROCESS = ""
"""The whole process, as every gRPC server has it."""
CONTROL = pb.DESCRIPTOR.services_by_name["Control"].full_name
SHARD_CONTROL = pb.DESCRIPTOR.services_by_name["ShardControl"].full_name
DATA = data_pb2.DESCRIPTOR.services_by_name["Data"].full_name
"""On a shard: it takes pushes. On a hub: every shard that a job needs is there and alive."""
READY = "ready"
"""On a hub alone: a worker that comes now is let in."""

WHY = "hubring-why-bin"
"""Trailing metadata, in UTF-8: hosts and jobs may be named in any alphabet."""

WHY_BYTES = 2000
"""How much of it is told: gRPC refuses metadata of 8 KiB, and a failure may hold a whole traceback."""

TELL_SECONDS = 0.1
"""How long a watcher that does not read may hold up the hub; it is told with a later tick."""

Troubles = Mapping[str, str]
"""For each service what is in its way, as a clause; empty where it serves."""


class _Health:
    """What a hub's and a shard's have in common: the servicer that gRPC ships, and reasons."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer
        self._why: dict[str, str] = {}
        self.Watch = servicer.Watch

    def add_to(self, server: Any) -> None:
        """Registers the service on a server that has not started yet."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def _all(self) -> Any:
        answer = health_pb2.HealthCheckResponse
        statuses = {service: answer(status=_status(why)) for service, why in self._why.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    def _explain(self, service: str, context: Any) -> None:
        if why := self._why.get(service):
            context.set_trailing_metadata(((WHY, why.encode()[:WHY_BYTES]),))


class HubHealth(_Health):
    """A hub's, for a server of the running event loop."""

    def __init__(self) -> None:
        super().__init__(health.aio.HealthServicer())
        self._told: dict[str, Any] = {}

    async def tell(self, troubles: Troubles) -> None:
        """Takes down how it goes; whoever watches learns of what has changed."""
        self._why.update(troubles)
        for service, why in troubles.items():
            if self._told.get(service) != _status(why):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._servicer.set(service, _status(why)), TELL_SECONDS)
                    self._told[service] = _status(why)

    async def Check(self, request: Any, context: Any) -> Any:
        self._explain(request.service, context)
        return await self._servicer.Check(request, context)

    async def List(self, request: Any, context: Any) -> Any:
        return self._all()


class ShardHealth(_Health):
    """A shard's, for a server with threads."""

    def __init__(self) -> None:
        super().__init__(health.HealthServicer())

    def tell(self, troubles: Troubles) -> None:
        """Takes down how it goes; whoever watches learns of what has changed. From any thread."""
        self._why.update(troubles)
        for service, why in troubles.items():
            self._servicer.set(service, _status(why))

    def Check(self, request: Any, context: Any) -> Any:
        self._explain(request.service, context)
        return self._servicer.Check(request, context)

    def List(self, request: Any, context: Any) -> Any:
        return self._all()


def _status(why: str) -> Any:
    answer = health_pb2.HealthCheckResponse
    return answer.NOT_SERVING if why else answer.SERVING
