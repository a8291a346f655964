"""When something dies: who goes on, who ends, and what they are told."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.training.assert_trained import assert_trained

pytestmark = pytest.mark.slow


def three(cluster: Cluster, address: str, tmp_path: Path, *flags: str) -> tuple[list[Program], Path]:
    """Three workers that hold at step 20 until the file exists."""
    go = tmp_path / "go"
    workers = [
        cluster.worker(address, "--rank", str(rank), *flags, SMALL, "60", "16", "hold", str(go), "20")
        for rank in range(3)
    ]
    for worker in workers:
        worker.until_said("holding at 20")
    return workers, go


MODES = [["--mode", "bsp"], ["--mode", "asp"], ["--mode", "ssp", "--staleness", "1"]]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode[1])
def test_the_others_finish_when_a_worker_is_killed(cluster: Cluster, tmp_path: Path, mode: list[str]) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "2", *mode)
    workers, go = three(cluster, address, tmp_path)
    workers[1].process.kill()
    if mode[1] == "asp":  # there nobody waits for anybody, and the others might be done before the lease
        workers[0].until_said("the job continues with 2 of 3 workers")
    go.touch()
    results = [workers[rank].done() for rank in (0, 2)]
    assert [result["steps"] for result in results] == [60, 60]
    assert all("the job continues with 2 of 3 workers" in workers[rank].said() for rank in (0, 2))
    summary = server.done()
    assert (summary["finished"], list(summary["lost"])) == ([0, 2], ["1"])
    if mode[1] == "bsp":
        runs = [run for shard in summary["shards"] for run in shard["partial_rounds"]]
        assert {(run["first"], run["last"], tuple(run["ranks"])) for run in runs} == {(20, 59, (0, 2))}


def test_after_a_loss_the_parameters_are_those_of_the_recorded_contributors(
    cluster: Cluster, tmp_path: Path
) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "2")
    final = tmp_path / "final.safetensors"
    workers, go = three(cluster, address, tmp_path, "--save-parameters", str(final))
    workers[1].process.kill()
    go.touch()
    for rank in (0, 2):
        workers[rank].done()
    (shard,) = server.done()["shards"]
    partial = {
        step: run["ranks"] for run in shard["partial_rounds"] for step in range(run["first"], run["last"] + 1)
    }
    assert partial, "no round was recorded without the killed worker"
    assert_trained(final, [partial.get(step, [0, 1, 2]) for step in range(60)])


def test_nobody_is_lost_while_the_server_was_held_up(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "2")
    workers, go = three(cluster, address, tmp_path)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(3)  # longer than the lease, and short enough for those who wait for the server
    server.process.send_signal(signal.SIGCONT)
    server.until_said("all leases are extended by that time")
    go.touch()
    assert [worker.done()["steps"] for worker in workers] == [60, 60, 60]
    assert (server.done()["finished"], server.done()["lost"]) == ([0, 1, 2], {})


def test_on_loss_wait_ends_the_job_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "2", "--on-loss", "wait")
    workers, go = three(cluster, address, tmp_path)
    workers[2].process.kill()
    go.touch()
    for rank in (0, 1):
        result = workers[rank].done(69)
        assert "rank 2" in result["error"]
        assert "--on-loss wait" in result["error"]
    assert server.done(69)["lost"].keys() == {"2"}


def test_the_ring_ends_with_a_clear_error(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "2")
    workers, go = three(cluster, address, tmp_path, "--topology", "ring")
    workers[1].process.kill()
    go.touch()
    for rank in (0, 2):
        error = workers[rank].done(69, timeout=20)["error"]
        assert "rank 1" in error
        assert "a ring cannot continue without it" in error
    server.done(69)


def test_a_stopped_worker_is_fenced_when_it_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "2")
    workers, go = three(cluster, address, tmp_path)
    workers[1].process.send_signal(signal.SIGSTOP)
    workers[0].until_said("the job continues with 2 of 3 workers")
    workers[1].process.send_signal(signal.SIGCONT)
    go.touch()
    assert "Restart the worker" in workers[1].done(75, timeout=15)["error"]
    for rank in (0, 2):
        workers[rank].done()
    server.done()


def test_a_killed_worker_is_lost_at_once_and_a_stopped_one_is_not(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "1000")
    workers, go = three(cluster, address, tmp_path)
    workers[0].process.send_signal(signal.SIGSTOP)
    workers[1].process.kill()
    workers[2].until_said("the job continues with 2 of 3 workers")
    workers[0].process.send_signal(signal.SIGCONT)
    go.touch()
    assert [workers[rank].done()["steps"] for rank in (0, 2)] == [60, 60]
    assert (server.done()["finished"], list(server.done()["lost"])) == ([0, 2], ["1"])


def test_a_restarted_worker_takes_its_place_again(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "2")
    workers, go = three(cluster, address, tmp_path)
    workers[1].process.kill()
    workers[0].until_said("the job continues with 2 of 3 workers")
    again = cluster.worker(address, "--rank", "1", SMALL, "60", "16", "hold", str(go), "20", name="again")
    again.until_said("holding at 20")
    go.touch()
    results = [program.done() for program in (workers[0], again, workers[2])]
    assert [result["steps"] for result in results] == [60, 60, 60]
    assert server.done()["finished"] == [0, 1, 2]
