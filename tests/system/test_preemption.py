"""A job that is asked to stop saves, ends with 75, and started again ends in the same bytes."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.support.processes.cluster import SMALL, Cluster, Program

pytestmark = pytest.mark.slow

KINDS = {"hub": [], "aggregate": ["--aggregate"], "ring": ["--topology", "ring"]}
FIRST = {("hub", "one"), ("aggregate", "all"), ("ring", "server")}
"""Every kind once and everyone who is told once: what `make test` runs of them."""


class Runs:
    """The same job again and again, its checkpoints in one folder a name."""

    def __init__(self, cluster: Cluster, tmp_path: Path, kind: str) -> None:
        self.cluster, self.folder, self.kind = cluster, tmp_path, kind

    def start(self, name: str, number: int, *hold: str) -> tuple[Program, list[Program]]:
        script = [SMALL, "60", "16", *hold]
        saved = self.folder / f"{name}-saved"
        flags = ["--workers", "2", "--once", "--slice-bytes", "128", "--checkpoint-dir", str(saved)]
        server, address = self.cluster.server(*flags, name=f"{name}-server{number}")
        keeps = [] if self.kind == "hub" else ["--checkpoint-dir", str(saved)]
        common = [*KINDS[self.kind], *keeps, "--save-parameters", str(self.folder / f"{name}.safetensors")]
        pair = [
            self.cluster.worker(
                address,
                "--rank",
                str(rank),
                *common,
                SMALL,
                "60",
                "16",
                *script,
                name=f"{name}-{number}-{rank}",
            )
            for rank in range(2)
        ]
        return server, pair

    def finish(self, name: str, number: int) -> dict[str, Tensor]:
        server, pair = self.start(name, number)
        for worker in pair:
            assert worker.done()["steps"] == 60
        assert server.done()["finished"] == [0, 1]
        return load_file(self.folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("kind", "whom"),
    [
        pytest.param(*case, marks=() if case in FIRST else pytest.mark.full)
        for case in product(KINDS, ("one", "all", "server"))
    ],
)
def test_a_job_that_was_stopped_ends_in_the_same_bytes(
    cluster: Cluster, tmp_path: Path, kind: str, whom: str
) -> None:
    runs, go = Runs(cluster, tmp_path, kind), tmp_path / "go"
    whole = runs.finish("whole", 0)
    server, pair = runs.start("parted", 0, "hold", str(go), "20")
    for worker in pair:
        worker.until_said("holding at 20")
    told = {"one": pair[:1], "all": [*pair, server], "server": [server]}[whom]
    for program in told:
        program.process.send_signal(signal.SIGTERM if whom == "server" else signal.SIGUSR1)
    for program in told:
        program.until_said("SIG")
    if (kind, whom) == ("ring", "server"):
        for worker in pair:
            worker.until_said("the server asked all workers to stop")  # by the next heartbeat
    go.touch()
    steps = {worker.done(75)["steps"] for worker in pair}
    assert len(steps) == 1, "the workers left after different steps"
    assert 20 < steps.pop() < 60
    assert server.done(75)["preempted"] == [0, 1]
    parted = runs.finish("parted", 1)
    assert whole.keys() == parted.keys()
    assert all(whole[name].equal(parted[name]) for name in whole)


def test_a_repeated_notice_is_no_second_wish(cluster: Cluster, tmp_path: Path) -> None:
    runs, go = Runs(cluster, tmp_path, "ring"), tmp_path / "go"
    server, pair = runs.start("noticed", 0, "hold", str(go), "20")
    for worker in pair:
        worker.until_said("holding at 20")
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        for worker in pair:
            worker.process.send_signal(number)
            worker.until_said("SIGUSR1")
    go.touch()
    assert {worker.done(75)["steps"] for worker in pair} == {22}
    server.done(75)


def test_a_checkpoint_of_another_model_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    worker = cluster.run("first", "hubring.workers.programs.ps_worker", *saved, SMALL, "5", "16")
    assert worker.done()["steps"] == 5
    again = cluster.run("second", "hubring.workers.programs.ps_worker", *saved, SMALL, "9", "16")
    assert again.done()["steps"] == 9
    assert "continuing from step 5" in again.said()
    other = cluster.run("third", "hubring.workers.programs.ps_worker", *saved, SMALL, "9", "12")
    assert "is of another model: '0.weight' is float32[8, 16] in the checkpoint" in other.done(78)["error"]


@pytest.mark.parametrize("kind", ["hub", "ring"])
def test_nobody_promises_a_checkpoint_that_is_not_written(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    go = tmp_path / "go"
    server, address = cluster.server("--workers", "1", "--once")
    worker = cluster.worker(address, *KINDS[kind], SMALL, "60", "16", "hold", str(go), "20")
    worker.until_said("holding at 20")
    server.process.send_signal(signal.SIGTERM)
    server.until_said("SIGTERM: workers finish their step; signal again to quit now")
    if kind == "ring":
        worker.until_said("the server asked all workers to stop")
    go.touch()
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
