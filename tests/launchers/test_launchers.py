"""The same worker command under torchrun, mpirun and `ps-worker --gpus`."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.launchers.commands import told, torchrun, worker
from tests.support.needs import needs
from tests.support.processes.cluster import SMALL, Cluster, Program

pytestmark = pytest.mark.slow
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", "--mca", "plm", "isolated"]
mpirun = needs(shutil.which("mpirun"), "mpirun", "apt-get install openmpi-bin")
mpiexec = needs(shutil.which("mpiexec.hydra"), "mpiexec.hydra", "apt-get install mpich")
TWO = ["--gpus", "2", "--accelerator", "cpu"]
TOPOLOGIES = pytest.mark.parametrize("topology", ["hub", pytest.param("ring", marks=pytest.mark.full)])
LAUNCHERS = ["torchrun", pytest.param("mpirun", marks=mpirun), pytest.param("mpiexec", marks=mpiexec)]


def as_root() -> list[str]:
    return ["--allow-run-as-root"] if os.geteuid() == 0 else []


def start(cluster: Cluster, launcher: list[str], *arguments: str) -> Program:
    return cluster.start("launcher", [*launcher, *worker(*arguments)])


@TOPOLOGIES
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_launcher_gives_the_ranks(cluster: Cluster, kind: str, topology: str) -> None:
    mpiexec = ["mpiexec.hydra", "-launcher", "fork", "-n", "2"]
    launcher = {"torchrun": torchrun(2), "mpirun": [*MPIRUN, *as_root()], "mpiexec": mpiexec}[kind]
    server, address = cluster.server("--once")
    program = start(cluster, launcher, "--server", address, "--topology", topology, SMALL, "10")
    assert program.wait() == 0, program.said()
    results = told(program.out.read_text())
    assert [(one["rank"], one["size"], one["steps"]) for one in results] == [(0, 2, 10), (1, 2, 10)]
    assert server.done()["finished"] == [0, 1]


def test_nodes_by_gpus_gives_the_ranks(cluster: Cluster) -> None:
    server, address = cluster.server("--once")
    common = ["--server", address, "--nodes", "2", "--gpus", "2", "--accelerator", "cpu"]
    nodes = [
        cluster.run(f"node{nr}", "hubring.workers.programs.ps_worker", *common, "--nr", str(nr), SMALL, "10")
        for nr in range(2)
    ]
    told = [one for node in nodes for one in node.done()["workers"]]
    assert [(one["rank"], one["size"], one["steps"]) for one in told] == [(rank, 4, 10) for rank in range(4)]
    assert server.done()["finished"] == [0, 1, 2, 3]


@TOPOLOGIES
@pytest.mark.parametrize("kind", ["gpus", pytest.param("mpirun", marks=mpirun)])
def test_a_notice_to_the_launcher_stops_all_after_one_step_with_75(
    cluster: Cluster, tmp_path: Path, kind: str, topology: str
) -> None:
    server, address = cluster.server("--once", "--checkpoint-dir", str(tmp_path / "saved"))
    launcher = [*MPIRUN, *as_root()] if kind == "mpirun" else []
    go = tmp_path / "go"
    flags = ["--server", address, "--topology", topology, *(TWO if kind == "gpus" else [])]
    keeps = ["--checkpoint-dir", str(tmp_path / "saved")] if topology == "ring" else []
    program = start(cluster, launcher, *flags, *keeps, SMALL, "60", "16", "hold", str(go), "20")
    program.until(lambda: _said(program).count("holding at 20") == 2, "both at step 20")
    program.process.send_signal(signal.SIGUSR1)
    program.until(lambda: _said(program).count("SIGUSR1: all workers") == 2, "notice of both")
    go.touch()
    assert program.wait() == 75, program.said()
    summary = server.done(75)
    assert (summary["preempted"], 20 < summary["steps"] < 60) == ([0, 1], True)
    assert "checkpoint of step" in server.said() + program.said()


@TOPOLOGIES
def test_workers_do_not_outlive_the_command_that_started_them(
    cluster: Cluster, tmp_path: Path, topology: str
) -> None:
    server, address = cluster.server("--once")
    go = tmp_path / "go"
    flags = ["--server", address, *TWO, "--topology", topology]
    program = start(cluster, [], *flags, SMALL, "60", "16", "hold", str(go), "20")
    program.until(lambda: _said(program).count("holding at 20") == 2, "both at step 20")
    program.process.kill()
    program.process.wait()
    server.until(lambda: program.said().count("SIGTERM: all workers") == 2, "end of the command told to both")
    go.touch()
    assert server.done(75)["preempted"] == [0, 1]


def _said(program: Program) -> str:
    return program.err.read_text() + program.out.read_text()
