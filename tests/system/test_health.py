"""Health of real programs: what engines probe, while a job comes and goes."""

from __future__ import annotations

import os
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from hubring.ps.observe.health import probe
from hubring.ps.security.access import find_access
from hubring.ps.security.guard import Role
from hubring.ps.transport.grpc.channel import open_channel
from tests.support.processes import stopwatch
from tests.support.processes.cluster import PATIENCE, Cluster, Program

pytestmark = pytest.mark.slow

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "hubring.v1.Control", "hubring.v1.Data", "ready")


def asking(address: str) -> grpc.Channel:
    return open_channel(address, find_access(address, Role.READER, None, PATIENCE))


def until(channel: grpc.Channel, service: str, wanted: int) -> None:
    """Waits until a service is so."""
    request, stub = health_pb2.HealthCheckRequest(service=service), health_pb2_grpc.HealthStub(channel)
    stopwatch.until(lambda: stub.Check(request, timeout=PATIENCE).status == wanted)


def probed(cluster: Cluster, address: str, service: str = "") -> Program:
    flags = ["--service", service] if service else []
    number = len(cluster.programs)
    return cluster.run(f"probe{number}", "hubring.ps.cli", "health", address, *flags)


def test_all_services_are_probed_and_told_by_reflection(cluster: Cluster) -> None:
    _, address = cluster.server("--shards", "2")
    with asking(address) as channel:
        until(channel, "hubring.v1.Data", SERVING)
        for service in SERVICES:
            probe(channel, address, service, PATIENCE)
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"hubring.v1.Control", "grpc.health.v1.Health"} <= set(services)
    assert probed(cluster, address).done() == {"address": address, "service": "", "serving": True}
    assert "no service 'data'" in probed(cluster, address, "data").done(2)["error"]


def test_a_server_that_is_being_stopped_is_not_ready(cluster: Cluster) -> None:
    server, address = cluster.server()
    (worker,) = cluster.held(address, count=1, steps=1_000_000)
    with asking(address) as channel:
        until(channel, "hubring.v1.Data", SERVING)
        until(channel, "ready", SERVING)
        server.process.send_signal(signal.SIGTERM)
        until(channel, "ready", NOT_SERVING)
        probe(channel, address, "hubring.v1.Data", PATIENCE)  # the job goes on to its next step
    refused = probed(cluster, address, "ready").done(69)["error"]
    assert refused == f"ready at {address} is NOT_SERVING: the server is stopping"
    cluster.go.touch()
    worker.done(75)
    server.done(75)
    assert f"no server answers at {address}" in probed(cluster, address).done(69)["error"]


def test_a_killed_shard_takes_data_and_readiness_away(cluster: Cluster) -> None:
    server, address = cluster.server("--shards", "2", "--lease", "60")  # it lives until its worker has left
    (worker,) = cluster.held(address, count=1)
    with asking(address) as channel:
        until(channel, "hubring.v1.Data", SERVING)
        os.kill(cluster.status(address)["shards"][1]["pid"], signal.SIGKILL)
        until(channel, "hubring.v1.Data", NOT_SERVING)
        until(channel, "ready", NOT_SERVING)
        refused = probed(cluster, address, "hubring.v1.Data").done(69)["error"]
        assert "the job has failed; for the reason, run: ps-server status" in refused
    cluster.go.touch()
    worker.done(69)
    server.done(69)
