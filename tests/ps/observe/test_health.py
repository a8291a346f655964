from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ShardControlStub
from hubring.ps.core.errors import ConfigError, ServerUnreachable, UsageError
from hubring.ps.observe.health import CONTROL, DATA, PROCESS, READY, SHARD_CONTROL, HubHealth
from hubring.ps.observe.health_check import probe
from hubring.ps.shard.control_service import ShardControl
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.grpc.channel import open_async_channel, open_channel
from tests.support.fakes.coordinator import Hub, run

SOON = 10.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
FINE = {PROCESS: "", CONTROL: "", DATA: "", READY: ""}


def ask(service: str) -> Any:
    return health_pb2.HealthCheckRequest(service=service)


# What is in a hub's way.


def test_data_waits_for_all_shards_and_readiness_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, shards=2)
        await hub.shard("one")
        assert hub.coordinator.troubles() == {**FINE, DATA: "starting 1 of 2 shards"}
        await hub.shard("two")
        assert hub.coordinator.troubles() == FINE

    run(story())


def test_a_ring_needs_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, workers=1)
        assert hub.coordinator.troubles()[DATA]
        await hub.join("a", topology="ring")
        assert hub.coordinator.troubles() == FINE

    run(story())


def test_a_silent_shard_takes_data_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, lease=5.0)
        await hub.shard()
        hub.fleet.shards[0].heard = hub.time.now()
        hub.time.advance(5.1)
        assert hub.coordinator.troubles() == {**FINE, DATA: "shard 0 (here pid 1) sends no heartbeat"}

    run(story())


def test_a_failed_job_takes_nobody_in_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, on_loss="wait")
        first, second = await hub.started()
        await hub.leave(first, "FAILED")
        troubles = hub.coordinator.troubles()
        assert troubles == {**FINE, DATA: troubles[READY], READY: troubles[READY]}
        assert troubles[READY] == "the job has failed; for the reason, run: ps-server status"
        await hub.leave(second, "FAILED")
        await hub.coordinator.tick()
        assert hub.coordinator.troubles() == FINE

    run(story())


def test_a_server_that_is_being_stopped_lets_its_job_end_but_nobody_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        workers = await hub.started()
        await hub.coordinator.drain()
        assert hub.coordinator.troubles() == {**FINE, READY: "the server is stopping"}
        for worker in workers:
            await hub.leave(worker, "PREEMPTED")
        await hub.coordinator.tick()
        assert hub.coordinator.troubles() == dict.fromkeys(FINE, "the server is ending")

    run(story())


# A hub that is asked.


class Served:
    """A hub's health on a port of its own."""

    async def __aenter__(self) -> Served:
        self.health = HubHealth()
        self._server = grpc.aio.server()
        self.health.add_to(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.health.tell(FINE)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def probe(self, service: str) -> None:
        await asyncio.to_thread(probe, self.address, service, SOON)


def test_check_tells_each_service_apart() -> None:
    async def story() -> None:
        async with Served() as hub, open_async_channel(hub.address) as channel:
            hub.health.tell({DATA: "waiting for 1 of 2 shards"})
            stub = health_pb2_grpc.HealthStub(channel)
            answers = {service: (await stub.Check(ask(service))).status for service in FINE}
            assert answers == {**dict.fromkeys(FINE, SERVING), DATA: NOT_SERVING}
            listed = (await stub.List(health_pb2.HealthListRequest())).statuses
            assert {service: answer.status for service, answer in listed.items()} == answers
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.Check(ask("hubring.v1.Nothing"))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

    run(story())


def test_a_probe_says_who_is_not_serving_and_why() -> None:
    async def story() -> None:
        async with Served() as hub:
            for service in FINE:
                await hub.probe(service)
            hub.health.tell({DATA: "shard 1 (bücher pid 7) sends no heartbeat"})
            with pytest.raises(ServerUnreachable) as refused:
                await hub.probe(DATA)
            assert str(refused.value) == (
                f"{DATA} at {hub.address} is NOT_SERVING: shard 1 (bücher pid 7) sends no heartbeat"
            )

    run(story())


def test_a_probe_for_no_service_of_ours_lists_those() -> None:
    async def story() -> None:
        async with Served() as hub:
            with pytest.raises(
                UsageError, match=rf"no service 'data': a hub has {CONTROL}, {DATA} and {READY}"
            ):
                await hub.probe("data")

    run(story())


def test_a_probe_where_nobody_listens_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match=rf"no server answers at {address} .* ps-server start"):
            probe(address, PROCESS, SOON)


def test_a_probe_of_another_server_points_at_the_port() -> None:
    async def story() -> None:
        server = grpc.aio.server()
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            with pytest.raises(ServerUnreachable, match=f"the server at {address} is neither a hub nor a"):
                await asyncio.to_thread(probe, address, PROCESS, SOON)
        finally:
            await server.stop(None)

    run(story())


def test_a_probe_wants_an_address() -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        probe("localhost", PROCESS)


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
