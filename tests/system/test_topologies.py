"""Every topology, mode, transport and shard count trains the same script to its end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.system.cluster import SMALL, Cluster

pytestmark = pytest.mark.slow

HUBS = [
    pytest.param(["--mode", "bsp"], [], id="bsp"),
    pytest.param(["--mode", "asp"], [], id="asp"),
    pytest.param(["--mode", "ssp", "--staleness", "2"], [], id="ssp"),
    pytest.param(["--mode", "backup", "--backup", "1"], [], id="backup"),
    pytest.param(["--shards", "2", "--slice-bytes", "256"], [], id="two-shards"),
    pytest.param([], ["--transport", "shm"], id="shm"),
    pytest.param([], ["--transport", "zmq"], id="zmq"),
    pytest.param([], ["--transport", "grpc"], id="grpc"),
    pytest.param([], ["--aggregate"], id="aggregate"),
    pytest.param([], ["--topology", "ring", "--backend", "gloo"], id="ring"),
]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize(("server_flags", "worker_flags"), HUBS)
def test_a_job_ends_with_a_result_and_leaves_nothing_behind(
    cluster: Cluster, server_flags: list[str], worker_flags: list[str]
) -> None:
    before = shared_memory()
    server, address = cluster.server("--workers", "2", "--once", *server_flags)
    pair = [cluster.worker(address, *worker_flags, SMALL, "40") for _ in range(2)]
    results = [worker.done() for worker in pair]
    summary = server.done()
    assert sorted(result["rank"] for result in results) == [0, 1]
    assert all(result["steps"] == 40 for result in results)
    assert all(result["metrics"]["loss"] < 0.5 for result in results)
    assert all(result["exchange"]["bytes_sent"] > 0 for result in results)
    assert summary["finished"] == [0, 1]
    assert shared_memory() == before
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0, "the server's port is still open"


def test_a_worker_without_a_server_trains_alone(cluster: Cluster) -> None:
    worker = cluster.run("alone", "workers.cli", SMALL, "40")
    result = worker.done()
    assert (result["topology"], result["size"], result["steps"]) == ("local", 1, 40)


def test_a_server_without_once_serves_one_job_after_the_other(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "1")
    assert cluster.worker(address, SMALL, "5", "16").done()["steps"] == 5
    server.until_said("ready for the next job")
    assert cluster.worker(address, SMALL, "5", "24").done()["steps"] == 5


def test_shards_of_another_host_serve_the_same_job(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "1", "--once", "--slice-bytes", "64")
    joined = cluster.run("joined", "ps.cli", "start", "--join", address, "--shards", "2")
    server.until_said("shard 2")
    cluster.worker(address, SMALL, "20").done()
    summary = server.done()
    assert [shard["pushes"] > 0 for shard in summary["shards"]] == [True, True, True]
    joined.done()
