"""When something dies: who goes on, who ends, and what they are told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.processes.cluster import SMALL, Cluster
from tests.support.training.assert_trained import assert_trained

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "mode",
    [
        ["bsp"],
        pytest.param(["asp"], marks=pytest.mark.full),
        pytest.param(["ssp", "--staleness", "1"], marks=pytest.mark.full),
    ],
    ids=lambda mode: mode[0],
)
def test_the_others_finish_when_a_worker_is_killed(cluster: Cluster, tmp_path: Path, mode: list[str]) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--mode", *mode)
    final = tmp_path / "final.safetensors"
    workers = cluster.held(address, "--save-parameters", str(final), count=3)
    workers[1].process.kill()
    if mode == ["asp"]:  # here workers do not wait for each other, and may finish before one is lost
        workers[0].until_said("the job continues with 2 of 3 workers")
    cluster.go.touch()
    results = [workers[rank].done() for rank in (0, 2)]
    assert [result["steps"] for result in results] == [60, 60]
    assert all("the job continues with 2 of 3 workers" in workers[rank].said() for rank in (0, 2))
    summary = server.done()
    assert (summary["finished"], list(summary["lost"])) == ([0, 2], ["1"])
    if mode == ["bsp"]:
        (shard,) = summary["shards"]
        (partial,) = shard["partial_rounds"]
        assert (partial["first"], partial["last"], partial["ranks"]) == (20, 59, [0, 2])
        assert_trained(final, [[0, 1, 2]] * 20 + [[0, 2]] * 40)


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_the_others_finish_without_a_worker_that_added_gradients_with_them(
    cluster: Cluster, tmp_path: Path, end: signal.Signals
) -> None:
    lease = ("--lease", "5") if end == signal.SIGSTOP else ()
    server, address = cluster.server("--workers", "3", "--once", *lease)
    final = tmp_path / "final.safetensors"
    flags = ("--local", "--transport", "zmq", "--save-parameters", str(final))
    workers = cluster.held(address, *flags, count=3)
    workers[1].process.send_signal(end)
    cluster.go.touch()
    assert [workers[rank].done()["steps"] for rank in (0, 2)] == [60, 60]
    for rank in (0, 2):
        assert "--local: this worker pushes its own gradients from now on: rank 1" in workers[rank].said()
        assert "the job continues with 2 of 3 workers" in workers[rank].said()
    assert server.done()["finished"] == [0, 2]
    assert_trained(final, [[0, 1, 2]] * 20 + [[0, 2]] * 40)


def test_a_killed_worker_is_lost_at_once_a_stopped_one_is_not_and_the_place_is_taken_again(
    cluster: Cluster,
) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "1000")
    # Rank 2 waits in an exchange, where the worker that takes the place gets its state at once.
    waiting = cluster.worker(address, "--rank", "2", SMALL, "60")
    stopped, killed = cluster.held(address)
    stopped.process.send_signal(signal.SIGSTOP)
    killed.process.kill()
    waiting.until_said("the job continues with 2 of 3 workers")
    stopped.process.send_signal(signal.SIGCONT)
    again = cluster.worker(address, "--rank", "1", SMALL, "60", "16", "hold", str(cluster.go), "20")
    again.until_said("holding at 20")
    cluster.go.touch()
    assert [worker.done()["steps"] for worker in (stopped, again, waiting)] == [60, 60, 60]
    assert server.done()["finished"] == [0, 1, 2]
