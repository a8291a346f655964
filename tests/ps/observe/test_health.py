from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ShardControlStub
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.observe.health import CONTROL, DATA, PROCESS, READY, SHARD_CONTROL, probe
from hubring.ps.shard.control_service import ShardControl
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.grpc.channel import open_channel
from tests.ps.observe.health_hub import SOON, HealthHub, ask
from tests.support.fakes.coordinator import Hub

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
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
    hub = Hub(on_loss="wait")
    first, second = await hub.started()
    await hub.leave(first, "FAILED")
    troubles = hub.reporter.troubles()
    assert troubles == {**FINE, DATA: troubles[READY], READY: troubles[READY]}
    assert troubles[READY] == "the job has failed; for the reason, run: ps-server status"
    await hub.leave(second, "FAILED")
    await hub.coordinator.tick()
    assert hub.reporter.troubles() == FINE


# A hub that is asked.


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
            await asyncio.to_thread(probe, hub.address, service, SOON)
        hub.health.tell({DATA: "shard 1 (bücher pid 7) sends no heartbeat"})
        with pytest.raises(ServerUnreachable) as refused:
            await asyncio.to_thread(probe, hub.address, DATA, SOON)
        assert str(refused.value) == (
            f"{DATA} at {hub.address} is NOT_SERVING: shard 1 (bücher pid 7) sends no heartbeat"
        )


async def test_a_probe_of_another_server_points_at_the_port() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with pytest.raises(ServerUnreachable, match=f"the server at {address} is neither a hub nor a"):
            await asyncio.to_thread(probe, address, PROCESS, SOON)
    finally:
        await server.stop(None)


# A shard that is asked.


class Shard:
    """A shard's control on a port of its own, before its hub has taken it in."""

    def __init__(self) -> None:
        self.control = ShardControl()
        self._loop = ShardLoop(BSP(), [])
        self._thread = threading.Thread(target=self._loop.run)
        self._server = grpc.server(ThreadPoolExecutor(4))
        self.control.add_to(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._thread.start()

    def begin(self) -> None:
        self.control.serve(self._loop, 0)

    def end(self) -> None:
        self._loop.stop()
        self._thread.join(SOON)
        self._server.stop(None).wait(SOON)


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard()
    yield shard
    shard.end()


def test_a_shard_serves_once_it_has_its_place(shard: Shard) -> None:
    probe(shard.address, PROCESS, SOON)
    for service in (SHARD_CONTROL, DATA):
        with pytest.raises(
            ServerUnreachable, match=f"{service} at .* the shard has not joined its server yet"
        ):
            probe(shard.address, service, SOON)
    shard.begin()
    for service in (PROCESS, SHARD_CONTROL, DATA):
        probe(shard.address, service, SOON)


def test_a_shard_whose_job_failed_serves_no_data_until_the_next_one(shard: Shard) -> None:
    shard.begin()
    with open_channel(shard.address) as channel:
        probe(shard.address, DATA, SOON)
        ShardControlStub(channel).Fail(pb.FailRequest(text="rank 1 was lost"), timeout=SOON)
        with pytest.raises(ServerUnreachable, match=f"{DATA} at .* the job has failed$"):
            probe(shard.address, DATA, SOON)
        probe(shard.address, SHARD_CONTROL, SOON)
        ShardControlStub(channel).Reset(pb.ResetRequest(), timeout=SOON)
        probe(shard.address, DATA, SOON)
