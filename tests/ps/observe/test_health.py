from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.observe.health import CONTROL, DATA, PROCESS, READY, HubHealth, probe
from hubring.ps.transport.grpc.channel import open_async_channel, open_channel
from tests.support.fakes.coordinator import Hub, in_training

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SOON = 10.0
FINE = {PROCESS: "", CONTROL: "", DATA: "", READY: ""}


# What is in a hub's way.


async def test_data_waits_for_all_shards_and_readiness_does_not() -> None:
    hub = Hub(shards=2)
    await hub.shard("one")
    assert hub.reporter.troubles() == {**FINE, DATA: "starting 1 of 2 shards"}
    await hub.shard("two")
    assert hub.reporter.troubles() == FINE


async def test_a_ring_needs_no_shard() -> None:
    hub = Hub(workers=1)
    assert hub.reporter.troubles()[DATA]
    await hub.join("a", topology="ring")
    assert hub.reporter.troubles() == FINE


async def test_a_silent_shard_takes_data_away() -> None:
    hub = Hub(lease=5.0)
    await hub.shard()
    hub.fleet.shards[0].heard = hub.time.now()
    hub.time.advance(5.1)
    assert hub.reporter.troubles() == {**FINE, DATA: "shard 0 (here pid 1) sends no heartbeat"}


async def test_a_failed_job_takes_nobody_in_until_the_next_one() -> None:
    hub, first, second = await in_training(on_loss="wait")
    await hub.leave(first, "FAILED")
    troubles = hub.reporter.troubles()
    assert troubles == {**FINE, DATA: troubles[READY], READY: troubles[READY]}
    assert troubles[READY] == "the job has failed; for the reason, run: ps-server status"
    await hub.leave(second, "FAILED")
    await hub.coordinator.tick()
    assert hub.reporter.troubles() == FINE


# A hub that is asked.


def ask(service: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=service)


class HealthHub:
    """A server of a hub's health, and a channel to it."""

    async def __aenter__(self) -> HealthHub:
        self.health = HubHealth()
        self.health.tell({READY: "waiting"})
        self._server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
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


def probed(address: str, service: str) -> None:
    with open_channel(address) as channel:
        probe(channel, address, service, SOON)


async def test_check_tells_each_service_apart() -> None:
    async with HealthHub() as hub:
        hub.health.tell({**FINE, DATA: "waiting for 1 of 2 shards"})
        stub = health_pb2_grpc.HealthStub(hub.channel)
        answers = {service: await hub.status(service) for service in FINE}
        assert answers == {**dict.fromkeys(FINE, SERVING), DATA: NOT_SERVING}
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {service: answer.status for service, answer in listed.items()} == answers
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(ask("hubring.v1.Nothing"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_probe_says_who_is_not_serving_and_why() -> None:
    async with HealthHub() as hub:
        hub.health.tell(FINE)
        for service in FINE:
            await asyncio.to_thread(probed, hub.address, service)
        hub.health.tell({DATA: "shard 1 (bücher pid 7) sends no heartbeat"})
        with pytest.raises(ServerUnreachable) as refused:
            await asyncio.to_thread(probed, hub.address, DATA)
        assert str(refused.value) == (
            f"{DATA} at {hub.address} is NOT_SERVING: shard 1 (bücher pid 7) sends no heartbeat"
        )


async def test_a_probe_of_another_server_points_at_the_port() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with pytest.raises(ServerUnreachable, match=f"the server at {address} is no hub; check the port"):
            await asyncio.to_thread(probed, address, PROCESS)
    finally:
        await server.stop(None)
