"""Every topology, mode, transport and shard count trains the same script to its end."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.processes.cluster import SMALL, TRAIN, Cluster, Program
from tests.support.processes.process_tree import left_behind, shared_memory

pytestmark = pytest.mark.slow
HUBS = [
    pytest.param(["--mode", "bsp"], ["--transport", "shm"], id="bsp-shm"),
    pytest.param(["--mode", "asp"], ["--transport", "zmq"], id="asp-zmq", marks=pytest.mark.full),
    pytest.param(["--mode", "ssp", "--staleness", "2"], ["--transport", "grpc"], id="ssp-grpc"),
    pytest.param(["--mode", "backup", "--backup", "1"], [], id="backup", marks=pytest.mark.full),
    pytest.param(["--shards", "2", "--slice-bytes", "256"], [], id="two-shards", marks=pytest.mark.full),
    pytest.param([], ["--topology", "ring", "--backend", "gloo"], id="ring"),
]


def falling(program: Program) -> bool:
    losses = [float(line.split()[-1]) for line in program.out.read_text().splitlines() if "loss" in line[:20]]
    return len(losses) == 10 and losses[-1] < losses[0] / 2


@pytest.mark.parametrize(("server_flags", "worker_flags"), HUBS)
def test_the_readmes_script_ends_with_a_result_and_leaves_nothing_behind(
    cluster: Cluster, server_flags: list[str], worker_flags: list[str]
) -> None:
    before = shared_memory()
    server, address = cluster.server("--workers", "2", "--once", *server_flags)
    pair = [cluster.worker(address, *worker_flags, TRAIN) for _ in range(2)]
    results = [worker.done() for worker in pair]
    summary = server.done()
    assert sorted(result["rank"] for result in results) == [0, 1]
    assert all(result["steps"] == 280 for result in results)
    assert falling(next(worker for worker in pair if worker.result()["rank"] == 0))
    assert all(result["exchange"]["bytes_sent"] > 0 for result in results)
    assert {result["exchange"]["hidden_seconds"] for result in results} == {None}, "known with --trace alone"
    assert (summary["finished"], summary["steps"]) == ([0, 1], 280)
    assert not left_behind(before)
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0, "the server's port is still open"


def test_the_readme_shows_the_script_that_these_tests_run() -> None:
    readme = Path(TRAIN).parents[2] / "README.md"
    assert f"```python\n{Path(TRAIN).read_text()}```" in readme.read_text()


def test_a_worker_without_a_server_trains_alone(cluster: Cluster) -> None:
    worker = cluster.run("alone", "hubring.workers.programs.ps_worker", TRAIN)
    result = worker.done()
    assert (result["topology"], result["size"], result["steps"]) == ("local", 1, 560)
    assert falling(worker)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [["--transport", "shm"], ["--transport", "zmq"], ["--transport", "grpc"], ["--topology", "ring"]],
    ids=["shm", "zmq", "grpc", "ring"],
)
def test_programs_that_take_their_modules_down_end_well_too(tmp_path: Path, flags: list[str]) -> None:
    """What the fork server forks ends before that. `make test` has such programs in test_name_collisions."""
    with Cluster(tmp_path) as cluster:  # starts each program as a Python of its own, as users do
        server, address = cluster.server("--workers", "2", "--once")
        pair = cluster.ranks(address, 2, *flags, SMALL, "5")
        assert [worker.done()["steps"] for worker in pair] == [5, 5]
        server.done()


@pytest.mark.parametrize("topology", ["hub", pytest.param("ring", marks=pytest.mark.full)])
def test_the_job_that_ships_needs_no_script(cluster: Cluster, topology: str) -> None:
    server, address = cluster.server("--workers", "2", "--once")
    pair = [cluster.worker(address, "--topology", topology, "--", "--epochs", "4") for _ in range(2)]
    results = [worker.done() for worker in pair]
    assert server.done()["job"] == "digits --epochs 4"
    first = next(result for result in results if result["rank"] == 0)
    assert first["metrics"]["test_accuracy"] > 0.8


@pytest.mark.parametrize("host", ["::1", pytest.param("localhost", marks=pytest.mark.full)])
def test_a_server_without_once_serves_one_job_after_the_other(cluster: Cluster, host: str) -> None:
    """Also at an address that is not the default."""
    server, address = cluster.server("--workers", "1", "--host", host)
    assert cluster.worker(address, SMALL, "5", "16").done()["steps"] == 5
    server.until_said("ready for the next job")
    assert cluster.worker(address, SMALL, "5", "24").done()["steps"] == 5
