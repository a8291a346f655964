"""`ps-server start --join`: shards of other hosts, which a job waits for and which end with the server."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.processes.cluster import SMALL, Cluster, Program, await_all
from tests.support.processes.ports import free_port

pytestmark = pytest.mark.slow


def joined(cluster: Cluster, address: str, name: str = "joined") -> Program:
    return cluster.run(name, "hubring.ps.cli", "start", "--join", address)


def test_a_job_waits_for_the_shards_of_other_hosts_which_end_with_the_server(cluster: Cluster) -> None:
    # The lease is long, so that who is not told of the end would still be there when the test looks.
    flags = ["--shards", "0", "--await-shards", "2", "--workers", "1", "--once", "--lease", "60"]
    server, address = cluster.server(*flags, "--slice-bytes", "64")
    worker = cluster.worker(address, SMALL, "20")
    worker.until_said("waiting for 2 of 2 shards (2 from other hosts: ps-server start --join ADDR)")
    hosts = [joined(cluster, address, f"host{number}") for number in range(2)]
    assert worker.done()["steps"] == 20
    summary = server.done()
    assert [shard["pushes"] > 0 for shard in summary["shards"]] == [True, True]
    assert [host.done(timeout=20)["exit_code"] for host in hosts] == [0, 0]
    assert "shards 0, and 2 on other hosts" in server.said()


LINGERING = """
import atexit, sys
if sys.orig_argv[-1] == "hubring.ps.shard.process":
    atexit.register(sys.stdin.buffer.read, 1)
"""
"""Such a shard ends only once its parent asks it to, as a shard on a busy host may."""


def test_a_signal_to_a_host_whose_shards_just_end_with_the_server_changes_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LINGERING)
    server, address = cluster.server("--shards", "0", "--await-shards", "1", "--workers", "1", "--once")
    command = ["start", "--join", address]
    host = cluster.run("joined", "hubring.ps.cli", *command, variables={"PYTHONPATH": str(tmp_path)})
    cluster.worker(address, SMALL, "5").done()
    server.done()
    host.process.send_signal(signal.SIGTERM)  # as Docker Compose, which stops one service after the other
    assert host.done()["exit_code"] == 0


def test_shards_and_workers_may_come_before_their_server(cluster: Cluster) -> None:
    port = str(free_port())
    host, worker = joined(cluster, f"127.0.0.1:{port}"), cluster.worker(f"127.0.0.1:{port}", SMALL, "5")
    await_all((host, worker), f"no server at 127.0.0.1:{port} yet")
    flags = ["--shards", "0", "--await-shards", "1", "--workers", "1", "--once"]
    server = cluster.run("server", "hubring.ps.cli", "start", "--port", port, *flags)
    assert worker.done()["steps"] == 5
    server.done()
    host.done()


@pytest.mark.full
@pytest.mark.parametrize("when", ["proof", "registration"])
def test_shards_wait_for_a_server_that_is_paused(cluster: Cluster, tmp_path: Path, when: str) -> None:
    """For longer than gRPC's handshake of 20 s. With a token file they connect over TCP."""
    tokens = ["--token-file", str(tmp_path / "tokens")]
    flags = ["--shards", "0", "--await-shards", "1", "--workers", "1", "--once", *tokens]
    server, address = cluster.server(*flags)
    if when == "proof":
        server.process.send_signal(signal.SIGSTOP)
    host = cluster.run("joined", "hubring.ps.cli", "start", "--join", address, *tokens)
    if when == "registration":
        host.until_said("shard(s) for")
        server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(AssertionError, match="within 24"):
        host.until(lambda: False, "end", timeout=24)
    server.process.send_signal(signal.SIGCONT)
    cluster.worker(address, *tokens, SMALL, "5").done()
    assert [program.wait() for program in (server, host)] == [0, 0]


@pytest.mark.full
def test_shards_whose_server_was_killed_end_with_69_and_say_so(cluster: Cluster) -> None:
    server, address = cluster.server("--shards", "0", "--await-shards", "1", "--lease", "2")
    host = joined(cluster, address)
    cluster.worker(address, SMALL, "5").done()  # the server says who joined before that one hears of it
    server.process.kill()
    host.done(69, timeout=15)
    assert f"the server at {address} has not answered for 4 s" in host.said()


@pytest.mark.full
def test_a_host_that_is_stopped_in_the_middle_of_a_job_exits_with_an_error(cluster: Cluster) -> None:
    _, address = cluster.server("--shards", "0", "--await-shards", "1", "--workers", "1", "--no-page")
    host = joined(cluster, address)
    worker = cluster.worker(address, SMALL, "1000000")
    worker.until(lambda: cluster.step(address) > 0, "steps")
    host.process.send_signal(signal.SIGTERM)
    assert host.done(128 + signal.SIGTERM)["exit_code"] == 128 + signal.SIGTERM
    assert "this host's shards stop; a job that still uses them fails" in host.said()
    assert worker.wait() != 0
