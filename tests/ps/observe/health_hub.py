"""A hub's health on a port of its own."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hubring.ps.observe.health import READY, HubHealth
from hubring.ps.transport.grpc.channel import open_async_channel

SOON = 10.0


def ask(service: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=service)


class HealthHub:
    """A server of a hub's health, and a channel to it."""

    async def __aenter__(self) -> HealthHub:
        self.health = HubHealth()
        self.health.tell({READY: "waiting"})
        self._server = grpc.aio.server()
        self.health.add_to(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self.channel = open_async_channel(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self._server.stop(None)

    async def status(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int((await stub.Check(ask(service), timeout=SOON)).status)
