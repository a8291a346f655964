"""`kill -9` of a server's process with `--standby 1`: the job ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hubring.ps.client.session import Session
from hubring.ps.job.outcome import LeaveReason
from hubring.workers.communicators.ring.group import RingStore, open_group
from tests.support.processes.cluster import PATIENCE, SMALL, Cluster, Program
from tests.support.processes.process_tree import coordinators, ends_by
from tests.support.scripts.small import loss_of, network, sgd

pytestmark = pytest.mark.slow

STEPS = 12
HELD_AT = 6
RING = ["--topology", "ring"]


def served(cluster: Cluster, *flags: str) -> tuple[Program, str]:
    """Starts a server, and waits for all standbys.

    A busy machine can keep a shard from connecting to the next coordinator in time: its standby replaces it.
    """
    server, address = cluster.server("--workers", "2", "--standby", "1", *flags)
    server.until(lambda: len(coordinators()) == 2 and guarded(cluster, address), "standbys")
    return server, address


def guarded(cluster: Cluster, address: str) -> bool:
    """Whether the shard has its standby."""
    shards = cluster.status(address)["shards"]
    return [row["standby"] is not None for row in shards] == [True]


def held(cluster: Cluster, address: str, *flags: str) -> list[Program]:
    """Starts two workers that hold at a step until `cluster.go` is there."""
    save = ["--save-parameters", str(cluster.folder / "final.safetensors")]
    return cluster.held(address, *flags, *save, steps=STEPS, at=HELD_AT)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_coordinator(server: Program, cluster: Cluster, address: str) -> None:
    """Kills the coordinator, and waits until its standby serves and has a standby of its own."""
    coordinator, standby = coordinators()
    kill(coordinator)
    server.until(lambda: coordinators()[:1] == [standby] and len(coordinators()) == 2, "another standby")
    server.until_said("its standby has taken over")
    assert cluster.status(address)["failovers"] >= 1


def finish(cluster: Cluster, workers: list[Program]) -> None:
    """Lets the workers go on; they end with the parameters of one process that steps with their mean loss."""
    cluster.go.touch()
    assert [worker.done()["steps"] for worker in workers] == [STEPS] * 2
    model = network(16)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        ((loss_of(model, step, 0, 16) + loss_of(model, step, 1, 16)) / 2).backward()
        optimizer.step()
    final = load_file(cluster.folder / "final.safetensors")
    assert all(tensor.allclose(final[name], atol=1e-6) for name, tensor in model.state_dict().items())


def test_a_job_survives_its_coordinator_and_its_shard(cluster: Cluster) -> None:
    server, address = served(cluster, "--once", "--no-page")
    workers = held(cluster, address)
    kill_coordinator(server, cluster, address)
    server.until(lambda: guarded(cluster, address), "the shard's standby")
    kill(cluster.status(address)["shards"][0]["pid"])
    server.until_said("has taken its place, and no step is lost")
    finish(cluster, workers)
    assert all("its standby has taken over" in worker.said() for worker in workers)
    result = server.done()
    assert (result["finished"], result["failovers"], result["steps"]) == ([0, 1], 2, STEPS)
    assert coordinators() == []


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bsp", "ring"])
def test_a_job_survives_its_standby_and_one_coordinator_after_another(cluster: Cluster, kind: str) -> None:
    server, address = served(cluster, "--no-page", "--once")
    workers = held(cluster, address, *(RING if kind == "ring" else ()))
    coordinator, standby = coordinators()
    kill(standby)
    server.until_said("was killed by signal 9 (SIGKILL); another one starts")
    server.until(lambda: len(coordinators()) == 2, "another standby")
    assert coordinators()[0] == coordinator
    for _ in range(3):
        kill_coordinator(server, cluster, address)
    finish(cluster, workers)
    assert server.done()["failovers"] == 3


@pytest.mark.full
def test_workers_can_join_across_a_takeover(cluster: Cluster) -> None:
    server, address = served(cluster, "--no-page", "--once")
    first = cluster.worker(address, SMALL, "5", "16")
    first.until_said("waited")
    kill_coordinator(server, cluster, address)
    second = cluster.worker(address, SMALL, "5", "16")
    assert [each.done()["steps"] for each in (first, second)] == [5, 5]
    assert server.done()["finished"] == [0, 1]


@pytest.mark.full
def test_members_of_a_ring_connect_across_a_takeover(cluster: Cluster) -> None:
    server, address = served(cluster, "--no-page", "--once")

    def join(rank: int) -> Session:
        return Session(address, job="script", topology="ring", rank=rank, start_timeout=PATIENCE)

    def connect(session: Session) -> float:
        store = RingStore(session.board, "ring", PATIENCE)
        rank, here = session.sender.rank, "127.0.0.1"
        group = open_group(rank, 2, store, "gloo", torch.device("cpu"), here, PATIENCE)
        total = torch.tensor([1.0 + rank])
        group.allreduce([total]).wait()
        group.barrier().wait()
        session.leave(LeaveReason.FINISHED)
        session.await_end()
        return float(total)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, range(2))
        with closing(first), closing(second):
            waiting = pool.submit(connect, first)
            second.board.lookup("ring/0/0", PATIENCE)  # the first rank has published where it listens
            kill_coordinator(server, cluster, address)
            assert [pool.submit(connect, second).result(PATIENCE), waiting.result(PATIENCE)] == [3.0, 3.0]
    assert server.done()["finished"] == [0, 1]


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), ("--restarts", "2")])
def test_a_job_outlives_the_process_that_a_person_started(cluster: Cluster, flags: tuple[str, ...]) -> None:
    server, address = served(cluster, "--no-page", *flags)
    workers = held(cluster, address)
    words, (coordinator, _) = "the server goes on until its job ends", coordinators()
    kill(server.process.pid)
    workers[0].until(lambda: server.said().count(words) == 1, words)
    kill(coordinator)
    workers[0].until(lambda: server.said().count(words) == 2, words)
    left = coordinators()
    finish(cluster, workers)
    assert server.wait() == -signal.SIGKILL
    assert all(ends_by(pid, time.monotonic() + PATIENCE) for pid in left)
    assert json.loads(server.out.read_text())["finished"] == [0, 1]


@pytest.mark.full
def test_a_worker_that_dies_while_there_is_no_coordinator_is_noticed(cluster: Cluster) -> None:
    server, address = served(cluster, "--no-page", "--once")
    workers = held(cluster, address)
    kill(workers[1].process.pid)
    kill_coordinator(server, cluster, address)
    server.until_said("the job continues with 1 of 2 workers")
    cluster.go.touch()
    assert workers[0].done()["steps"] == STEPS
    result = server.done()
    assert (result["finished"], list(result["lost"])) == ([0], ["1"])


@pytest.mark.full
@pytest.mark.parametrize("again", [False, True])
def test_a_stop_request_before_a_takeover_counts_after_it(
    cluster: Cluster, tmp_path: Path, again: bool
) -> None:
    saved = tmp_path / "saved"
    server, address = served(cluster, "--no-page", "--checkpoint-dir", str(saved))
    workers = cluster.held(address, steps=1_000_000)
    server.process.send_signal(signal.SIGTERM)
    server.until_said("workers finish their step, then the server writes a checkpoint")
    kill_coordinator(server, cluster, address)
    if again:
        server.process.send_signal(signal.SIGTERM)
        server.done(128 + signal.SIGTERM)
        for worker in workers:
            worker.process.kill()
        return
    cluster.go.touch()
    assert {worker.wait() for worker in workers} == {75}
    result = server.done(75)
    assert (result["preempted"], result["checkpoint"] != "") == ([0, 1], True)


@pytest.mark.full
def test_the_page_the_tokens_and_the_next_job_survive_a_takeover(cluster: Cluster) -> None:
    server, address = served(cluster, "--page-port", "0")
    workers = held(cluster, address)
    page = next(line.split()[1] for line in server.said().splitlines() if line.startswith("  metrics"))
    kill_coordinator(server, cluster, address)
    metrics = urllib.request.urlopen(page, timeout=30).read().decode()
    assert "ps_failovers_total 1.0" in metrics
    finish(cluster, workers)
    kill_coordinator(server, cluster, address)
    again = [cluster.worker(address, SMALL, "5", "16") for _ in range(2)]
    assert [worker.done()["steps"] for worker in again] == [5, 5]
    server.process.send_signal(signal.SIGINT)
    assert server.done(128 + signal.SIGINT)["failovers"] == 2


@pytest.mark.full
def test_a_coordinator_that_is_killed_as_a_standby_joins_a_shard_costs_no_step(cluster: Cluster) -> None:
    server, address = served(cluster, "--no-page", "--once")
    workers = [cluster.worker(address, SMALL, "1000000", "16", "pace", "0.02") for _ in range(2)]
    workers[0].until(lambda: cluster.step(address) > 0, "steps")
    coordinator, shard = coordinators()[0], cluster.status(address)["shards"][0]
    kill(shard["standby"]["pid"])
    server.until(lambda: server.said().count("follows shard 0") == 2, "another standby")
    kill(coordinator)  # it has not recorded yet that the standby has the state
    server.until_said("its standby has taken over")
    server.until(lambda: cluster.status(address)["shards"][0]["standby"] is not None, "pair")
    kill(shard["pid"])
    server.until_said("has taken its place, and no step is lost")
    server.process.send_signal(signal.SIGTERM)
    assert [program.wait() for program in (*workers, server)] == [75, 75, 75]
    assert server.result()["failovers"] == 2


@pytest.mark.full
@pytest.mark.parametrize("killed", [True, False])
def test_a_shard_that_is_lost_while_a_coordinator_takes_over_costs_no_step(
    cluster: Cluster, tmp_path: Path, killed: bool
) -> None:
    server, address = served(cluster, "--no-page", "--once")
    words = ["--save-parameters", str(tmp_path / "final.safetensors"), SMALL, str(STEPS), "16"]
    hold = ["hold", str(cluster.go), str(HELD_AT)]  # rank 0 waits in its exchange for rank 1
    workers = [
        cluster.worker(address, "--rank", str(rank), *words, *(hold if rank else ())) for rank in range(2)
    ]
    workers[1].until_said("holding")
    shard = cluster.status(address)["shards"][0]["pid"]
    kill(coordinators()[0])
    os.kill(shard, signal.SIGSTOP)
    server.until_said("its standby has taken over")
    if killed:
        cluster.status(address)  # by now it calls the shard
        kill(shard)
    server.until_said("has taken its place, and no step is lost")
    finish(cluster, workers)
    assert server.done()["failovers"] == 2


@pytest.mark.full
def test_a_resumed_job_survives_its_shard(cluster: Cluster, tmp_path: Path) -> None:
    saved = ("--checkpoint-dir", str(tmp_path / "saved"))
    server, address = cluster.server("--workers", "2", "--once", *saved, name="first")
    for worker in [cluster.worker(address, SMALL, str(HELD_AT - 2), "16") for _ in range(2)]:
        worker.done()
    server.done()
    server, address = served(cluster, "--no-page", "--once", *saved)
    workers = held(cluster, address)
    kill(cluster.status(address)["shards"][0]["pid"])
    server.until_said("has taken its place, and no step is lost")
    finish(cluster, workers)
    assert server.done()["failovers"] == 1
