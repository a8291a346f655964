"""A ring with --min-workers goes on when a member is killed, and lets a new worker in."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.processes.cluster import SMALL, Cluster, Program, await_all
from tests.support.training.assert_trained import assert_trained

pytestmark = pytest.mark.slow

STEPS = 60


def members(cluster: Cluster, address: str, least: int, *flags: str) -> list[Program]:
    """Three members of a ring that hold at step 20 until `cluster.go` is there."""
    return cluster.held(
        address, "--topology", "ring", "--min-workers", str(least), *flags, count=3, steps=STEPS
    )


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_others_take_the_steps_without_a_killed_member(
    cluster: Cluster, tmp_path: Path, victim: int
) -> None:
    server, address = cluster.server("--workers", "3", "--once")
    final = tmp_path / "final.safetensors"
    workers = members(cluster, address, 2, "--save-parameters", str(final))
    workers[victim].process.kill()
    cluster.go.touch()
    left = [rank for rank in range(3) if rank != victim]
    results = [workers[rank].done() for rank in left]
    assert [result["steps"] for result in results] == [STEPS, STEPS]
    assert [(result["rank"], result["size"]) for result in results] == [(0, 2), (1, 2)]
    assert all("ring generation 2: 2 worker(s)" in workers[rank].said() for rank in left)
    summary = server.done()
    assert (summary["finished"], list(summary["lost"])) == (left, [str(victim)])
    # Ranks change behind the step that lost the member.
    assert_trained(final, [[0, 1, 2]] * 20 + [left] + [[0, 1]] * (STEPS - 21))


def test_too_few_members_end_the_job(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "3", "--once")
    workers = members(cluster, address, 3)
    workers[1].process.kill()
    cluster.go.touch()
    for rank in (0, 2):
        workers[rank].done(69)
        assert "2 workers are left, and --min-workers is 3. Restart the job" in workers[rank].said()
    server.wait()


@pytest.mark.full
def test_a_frozen_member_is_lost_with_its_lease(cluster: Cluster) -> None:
    _, address = cluster.server("--workers", "3", "--lease", "3")
    workers = members(cluster, address, 2)
    workers[1].process.send_signal(signal.SIGSTOP)
    cluster.go.touch()
    for rank in (0, 2):
        assert workers[rank].done()["size"] == 2
    workers[1].process.send_signal(signal.SIGCONT)
    workers[1].done(75)


@pytest.mark.full
def test_a_replacement_goes_on_with_the_others_state(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "3", "--once")
    go, last = tmp_path / "go", tmp_path / "last"
    flags = ["--topology", "ring", "--min-workers", "2"]
    script = [SMALL, "2000", "16", "hold", str(go), "20", "hold", str(last), "1990"]
    workers = cluster.ranks(address, 3, *flags, *script)
    await_all(workers, "holding at 20")
    workers[1].process.kill()
    joiner = cluster.worker(address, *flags, *script)
    joiner.until_said("ring that continues")
    go.touch()
    team = [workers[0], workers[2], joiner]
    await_all(team, "holding at 1990")
    last.touch()
    results = [worker.done() for worker in team]
    assert [(result["rank"], result["size"]) for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({result["metrics"]["loss"] for result in results}) == 3
    assert server.done()["finished"] == [0, 1, 2]
