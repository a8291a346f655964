"""grpc.health.v1 for each service of a hub and of a shard.

Law: a service is SERVING if and only if nothing blocks it. The protocol has no field for
the reason, so the reply to Check carries it as trailing metadata. A client that ignores
the metadata sees a plain NOT_SERVING.
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

WATCHER_SECONDS = 0.1
"""Seconds that a watcher which does not read can delay the hub. The next call of `tell` tries again."""

Troubles = Mapping[str, str]
"""For each service the reason why it does not serve, as a clause; empty if it serves."""


class _Health:
    """Adds reasons to the health servicer that gRPC ships."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer
        self._why: dict[str, str] = {}
        self.Watch = servicer.Watch

    def add_to(self, server: Any) -> None:
        """Registers the service on a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def _all(self) -> Any:
        answer = health_pb2.HealthCheckResponse
        statuses = {service: answer(status=_status(why)) for service, why in self._why.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    def _explain(self, service: str, context: Any) -> None:
        if why := self._why.get(service):
            context.set_trailing_metadata(((WHY, why.encode()[:WHY_BYTES]),))


class HubHealth(_Health):
    """Health of a hub, for a server of the running event loop."""

    def __init__(self) -> None:
        super().__init__(health.aio.HealthServicer())
        self._told: dict[str, Any] = {}

    async def tell(self, troubles: Troubles) -> None:
        """Updates the services' states and notifies watchers of changes."""
        self._why.update(troubles)
        for service, why in troubles.items():
            if self._told.get(service) != _status(why):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._servicer.set(service, _status(why)), WATCHER_SECONDS)
                    self._told[service] = _status(why)

    async def Check(self, request: Any, context: Any) -> Any:
        self._explain(request.service, context)
        return await self._servicer.Check(request, context)

    async def List(self, request: Any, context: Any) -> Any:
        return self._all()


class ShardHealth(_Health):
    """Health of a shard, for a server with threads."""

    def __init__(self) -> None:
        super().__init__(health.HealthServicer())

    def tell(self, troubles: Troubles) -> None:
        """Updates the services' states and notifies watchers of changes. Safe from any thread."""
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
