"""Shards and standbys that are killed or frozen while a job has both."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.processes.process_tree import below, runs

pytestmark = [pytest.mark.slow, pytest.mark.full]

SERVER = ("--workers", "2", "--once", "--no-page", "--standby", "1")


def train(server: Program, cluster: Cluster, address: str) -> tuple[list[Program], list[dict[str, Any]]]:
    """Starts two workers that train until the server stops; returns them, and the shards' status then."""
    workers = [cluster.worker(address, SMALL, "1000000", "16", "pace", "0.02") for _ in range(2)]
    server.until(lambda: cluster.step(address) > 10, "step 10")
    return workers, cluster.status(address)["shards"]


def stop(server: Program, workers: list[Program]) -> None:
    """Asks the server to stop, and waits until all workers have taken one more step and left."""
    server.process.send_signal(signal.SIGTERM)
    assert [program.wait() for program in (server, *workers)] == [75, 75, 75]


def with_joined_host(
    cluster: Cluster, *flags: str
) -> tuple[Program, Program, list[Program], list[dict[str, Any]]]:
    """Starts a server, a joined host and workers; returns them, and the shards' status in training."""
    server, address = cluster.server(*SERVER, "--await-shards", "1", *flags)
    join = cluster.run("join", "hubring.ps.cli", *("start", "--join", address, "--standby", "1"))
    return server, join, *train(server, cluster, address)


def shards() -> list[int]:
    """Returns the processes of shards and standbys below this process."""
    return [pid for pid in below(os.getpid()) if runs(pid, "hubring.ps.shard.process")]


def test_a_frozen_shard_is_replaced_and_gives_way_to_a_standby(cluster: Cluster) -> None:
    server, address = cluster.server(*SERVER, "--lease", "5")
    workers, (row,) = train(server, cluster, address)
    os.kill(pid := row["pid"], signal.SIGSTOP)
    server.until_said("has taken its place, and no step is lost")
    server.until_said(f"(pid {pid}) was killed by signal 9 (SIGKILL); starting a standby")
    stop(server, workers)
    assert server.result()["failovers"] == 1


def test_a_frozen_standby_is_given_up_and_another_one_takes_the_place_of_the_shard(cluster: Cluster) -> None:
    server, address = cluster.server(*SERVER)
    workers, (row,) = train(server, cluster, address)
    frozen = row["standby"]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    server.until_said(f"pid {frozen}) sent no heartbeat for ")
    server.until_said("goes on without a standby")
    server.until_said(f"(pid {frozen}) was killed by signal 9 (SIGKILL); starting a standby")
    server.until(lambda: server.said().count("follows shard 0") == 2, "another standby")
    os.kill(row["pid"], signal.SIGKILL)
    server.until_said("has taken its place, and no step is lost")
    stop(server, workers)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_joined_host_goes_on_without_the_shard_that_it_lost(cluster: Cluster, frozen: bool) -> None:
    server, join, workers, rows = with_joined_host(cluster, "--lease", "5")
    theirs = join.children("hubring.ps.shard.process")
    pid = next(row["pid"] for row in rows if row["pid"] in theirs)
    os.kill(pid, signal.SIGSTOP if frozen else signal.SIGKILL)
    server.until_said("has taken its place, and no step is lost")
    join.until_said(f"(pid {pid}) was killed by signal 9 (SIGKILL); starting a standby")
    stop(server, workers)
    join.done()


def test_a_joined_host_goes_on_without_a_standby_that_was_given_up(cluster: Cluster) -> None:
    server, join, workers, rows = with_joined_host(cluster, "--lease", "5")
    theirs = join.children("hubring.ps.shard.process")
    (pid,) = [row["standby"]["pid"] for row in rows if row["standby"]["pid"] in theirs]
    os.kill(pid, signal.SIGSTOP)
    server.until_said("goes on without a standby")
    join.until_said(f"a standby process (pid {pid}) was killed by signal 9 (SIGKILL); starting a standby")
    stop(server, workers)
    join.done()


def test_a_standby_that_is_killed_before_it_registers_fails_no_job(cluster: Cluster) -> None:
    server, address = cluster.server(*SERVER)
    workers, (row,) = train(server, cluster, address)
    known = set(shards())
    os.kill(row["standby"]["pid"], signal.SIGKILL)
    server.until(lambda: set(shards()) - known != set(), "another standby")
    (pid,) = set(shards()) - known
    os.kill(pid, signal.SIGKILL)
    server.until_said(f"(pid {pid}) was killed by signal 9 (SIGKILL); starting a standby")
    stop(server, workers)
