"""Workers that end before the first step: each of their ranks is free again, and the others wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.cluster import SMALL, Cluster, Program

pytestmark = pytest.mark.slow

PAUSES = """
import sys, time
from pathlib import Path

import hubring
from hubring.ps.client.join import Admission
from hubring.workers.communicators.ring.group import RingStore
from hubring.workers.communicators.slice_tuning import SliceTrial
from tests.support.scripts import small

def pause(*_):
    print("paused", file=sys.stderr, flush=True)
    while not go.exists():
        time.sleep(0.02)

joins, where, go = Admission.join, sys.argv.pop(1), Path(__file__).with_suffix(".go")
if where == "join":
    Admission.join = lambda *arguments: (joins(*arguments), pause())[0]
if where == "meet":
    sets = RingStore.set
    RingStore.set = lambda *arguments: (sets(*arguments), print("came", file=sys.stderr, flush=True))
if where == "step":
    hubring.DistributedOptimizer.step = pause
if where == "trial":
    pulls, second = SliceTrial._pull, iter([False, True])
    SliceTrial._pull = lambda *slices, push=False: (push and next(second) and pause()) or pulls(
        *slices, push=push
    )
hubring.init()
if where in ("collective", "called"):
    hubring.barrier()
if where in ("init", "collective"):
    pause()
small.main()
"""
"""Pauses before the first heartbeat (`join`), after `init`, as one that loads data, after a `collective`, for
which the others are `called` too, after the first backward (`step`), whose gradients the workers show each
other, or amid a trial of slices (`trial`). Prints when a ring's worker has come (`meet`).
"""


@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_a_worker_that_gives_up_frees_its_rank(cluster: Cluster, topology: str) -> None:
    server, address = cluster.server("--workers", "2", "--once", "--lease", "1000")
    flags = ["--topology", topology, SMALL, "5"]
    cluster.worker(address, "--timeout", "1", *flags).done(1)
    pair = [cluster.worker(address, *flags) for _ in range(2)]
    assert [worker.done()["steps"] for worker in pair] == [5, 5]
    assert server.done()["finished"] == [0, 1]


@pytest.mark.parametrize(
    ("where", "flags", "topology", "rank"),
    [
        pytest.param("join", [], "hub", 1, marks=pytest.mark.full),
        ("join", [], "ring", 1),
        ("init", [], "hub", 0),
        ("init", [], "ring", 0),
        ("init", ["--on-loss", "wait"], "hub", 1),
        ("init", ["--colocate"], "hub", 1),
        ("join", ["--colocate"], "hub", 1),
        ("collective", [], "hub", 0),
        pytest.param("collective", [], "hub", 1, marks=pytest.mark.full),
        ("step", ["--on-loss", "wait"], "hub", 0),
        ("step", [], "hub", 0),
        ("trial", [], "hub", 0),
        pytest.param("trial", ["--on-loss", "wait"], "hub", 1, marks=pytest.mark.full),
        pytest.param("step", ["--on-loss", "wait", "--standby", "1"], "hub", 1, marks=pytest.mark.full),
    ],
)
def test_a_worker_that_is_killed_before_the_first_step_is_waited_for(
    cluster: Cluster, tmp_path: Path, where: str, flags: list[str], topology: str, rank: int
) -> None:
    server, address = cluster.server("--workers", "3", "--once", "--lease", "1000", *flags)
    script = tmp_path / "pauses.py"
    script.write_text(PAUSES)
    tries = where == "trial"

    def worker(rank: int, where: str) -> Program:
        # Sizes are tried with a model that they cut differently, and not in shared memory.
        few, many = (["--transport", "zmq"], ["100000"]) if tries else ([], [])
        flags = ["--topology", topology, "--rank", str(rank), *few]
        return cluster.worker(address, *flags, str(script), where, "5", *many)

    lost = worker(rank, where)
    # A colocated job is lost with a worker once the others have made their plan.
    rest = "called" if where == "collective" else "nowhere"
    until = where if "--colocate" in flags else rest
    workers = [worker(other, until) for other in range(3) if other != rank]
    lost.until_said("paused")
    lost.process.kill()
    server.until_said(f"waiting for 1 of 3 workers (rank {rank} not started yet)")
    script.with_suffix(".go").touch()
    workers.append(worker(rank, rest))
    assert [each.done()["steps"] for each in workers] == [5, 5, 5]
    summary = server.done()
    assert summary["finished"] == [0, 1, 2]
    assert not any(shard["partial_rounds"] for shard in summary["shards"]), "every round has all workers"


def test_a_ring_waits_for_one_that_is_killed_just_before_the_last_comes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The others do not connect to it in the seconds in which it is not given up yet."""
    server, address = cluster.server("--workers", "2", "--once", "--lease", "1000")
    script = tmp_path / "pauses.py"
    script.write_text(PAUSES)
    ring = [address, "--topology", "ring", "--rank"]
    last = cluster.worker(*ring, "1", str(script), "init", "5")
    lost = cluster.worker(*ring, "0", str(script), "meet", "5")
    last.until_said("paused")
    lost.until_said("came")
    lost.process.kill()
    with cluster.asking(address) as status:
        server.until(lambda: not status()["workers"][0]["connected"], "rank 0 disconnected")
    script.with_suffix(".go").touch()
    server.until_said("waiting for 1 of 2 workers (rank 0 not started yet)")
    again = cluster.worker(*ring, "0", str(script), "nowhere", "5")
    assert [each.done()["steps"] for each in (last, again)] == [5, 5]
