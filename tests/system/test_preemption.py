"""A job that is asked to stop saves, ends with 75, and started again ends in the same bytes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.support.processes.cluster import SMALL, Cluster, Program, await_all
from tests.support.processes.fork_server import ForkServer

pytestmark = pytest.mark.slow

KINDS = {"hub": [], "aggregate": ["--aggregate"], "ring": ["--topology", "ring"]}
FIRST = [("hub", "ctrl-c"), ("ring", "server")]
"""What `make test` runs of them. In test_own_state.py it stops a hub that averages."""
OTHERS = [("hub", "server"), ("hub", "one"), ("aggregate", "all"), ("ring", "one")]


class Runs:
    """The same job again and again, from the checkpoints in one folder."""

    def __init__(self, cluster: Cluster, kind: str) -> None:
        self.cluster, self.kind = cluster, kind
        self.final = cluster.folder / "final.safetensors"

    def start(self, shards: str = "1") -> tuple[Program, str, list[str]]:
        """Starts a server; returns it, its address, and the flags of workers."""
        saves = ["--checkpoint-dir", str(self.cluster.folder / "saved")]
        flags = ["--workers", "2", "--once", "--slice-bytes", "128", *saves, "--shards", shards]
        server, address = self.cluster.server(*flags, name=f"server{len(self.cluster.programs)}")
        keeps = [] if self.kind == "hub" else saves
        return server, address, [*KINDS[self.kind], *keeps, "--save-parameters", str(self.final)]

    def finish(self, steps: int, shards: str = "1") -> dict[str, Tensor]:
        """Runs the job to its end; returns its parameters."""
        server, address, flags = self.start(shards)
        pair = self.cluster.ranks(address, 2, *flags, SMALL, str(steps))
        assert [worker.done()["steps"] for worker in pair] == [steps, steps]
        assert server.done()["finished"] == [0, 1]
        return load_file(self.final)


@pytest.fixture(scope="module")
def wholes(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], dict[str, Tensor]]:
    """Returns the parameters of an undisturbed job of a kind after some steps."""

    @cache
    def whole(kind: str, steps: int) -> dict[str, Tensor]:
        with Cluster(tmp_path_factory.mktemp(kind), fork_server) as cluster:
            return Runs(cluster, kind).finish(steps)

    return whole


@pytest.mark.parametrize(
    ("kind", "whom"), [*FIRST, *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)]
)
def test_a_job_that_was_stopped_ends_in_the_same_bytes(
    cluster: Cluster, wholes: Callable[[str, int], dict[str, Tensor]], kind: str, whom: str
) -> None:
    """On another number of shards too."""
    runs = Runs(cluster, kind)
    server, address, flags = runs.start()
    pair = cluster.held(address, *flags, steps=1_000_000)
    told = {"one": pair[:1], "all": [*pair, server]}.get(whom, [server])
    number = {"server": signal.SIGTERM, "ctrl-c": signal.SIGINT}.get(whom, signal.SIGUSR1)
    for program in told:
        program.process.send_signal(number)
    await_all(told, "SIG")
    if (kind, whom) == ("ring", "server"):
        await_all(pair, "the server asked all workers to stop")  # by the next heartbeat
    cluster.go.touch()
    steps = {worker.done(75)["steps"] for worker in pair}
    assert len(steps) == 1, "the workers left after different steps"
    assert server.done(130 if whom == "ctrl-c" else 75)["preempted"] == [0, 1]
    last = steps.pop() + 40
    parted, whole = runs.finish(last, "2" if kind == "hub" else "1"), wholes(kind, last)
    assert whole.keys() == parted.keys()
    assert all(whole[name].equal(parted[name]) for name in whole)


@pytest.mark.full
def test_a_repeated_notice_is_no_second_wish(cluster: Cluster) -> None:
    server, address, flags = Runs(cluster, "ring").start()
    pair = cluster.held(address, *flags)
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        for worker in pair:
            worker.process.send_signal(number)
            worker.until_said("SIGUSR1")
    cluster.go.touch()
    assert {worker.done(75)["steps"] for worker in pair} == {22}
    server.done(75)


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    worker = cluster.run("first", "hubring.workers.programs.ps_worker", *saved, SMALL, "5", "16")
    assert worker.done()["steps"] == 5
    again = cluster.run("second", "hubring.workers.programs.ps_worker", *saved, SMALL, "9", "16")
    assert again.done()["steps"] == 9
    assert "continuing from step 5" in again.said()
    other = cluster.run("third", "hubring.workers.programs.ps_worker", *saved, SMALL, "9", "12")
    assert "is of another model: '0.weight' is float32[8, 16] in the checkpoint" in other.done(78)["error"]


@pytest.mark.parametrize("kind", ["hub", pytest.param("ring", marks=pytest.mark.full)])
def test_no_program_promises_an_unwritten_checkpoint(cluster: Cluster, kind: str) -> None:
    server, address = cluster.server("--workers", "1", "--once")
    (worker,) = cluster.held(address, *KINDS[kind], count=1, steps=1_000_000)
    server.process.send_signal(signal.SIGTERM)
    server.until_said("SIGTERM: workers finish their step; signal again to quit now")
    if kind == "ring":
        worker.until_said("the server asked all workers to stop")
    cluster.go.touch()
    worker.done(75)
    server.done(75)
    assert "nothing is saved: no --checkpoint-dir is set" in worker.said()
    assert "last checkpoint" not in worker.said() + server.said()
    cost = "a hub that loses this server or a shard loses all steps"
    assert f"  saves     nothing: without --checkpoint-dir, {cost}\n" in server.said()


def test_a_server_without_a_job_promises_nothing(cluster: Cluster, tmp_path: Path) -> None:
    server, _ = cluster.server("--checkpoint-dir", str(tmp_path / "saved"))
    assert f"  saves     every 60 s to {tmp_path / 'saved'}\n" in server.said()
    server.process.send_signal(signal.SIGTERM)
    assert server.done(75)["checkpoint"] == ""
    assert "SIGTERM: the server stops; no job is running" in server.said()
