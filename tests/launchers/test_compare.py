"""One experiment over the tasks of torchrun and srun, and what happens when one of them is killed."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.commands import torchrun
from tests.launchers.slurm import Slurm
from tests.support.compare.anywhere import PATIENT, aligned, reported, results, write_experiment
from tests.support.processes.cluster import Cluster, Program, measured
from tests.support.processes.machines import NEED_MACHINES, machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]

COMPARE = "hubring.workers.compare.cli"
WORDS = measured(60, "--rows=ring,hub-bsp", "--seeds=1")


def compared(folder: Path, other: str = "ring", hub: str = "hub-bsp") -> dict[str, Any]:
    """What the comparison found, after a look at whether both ways are there, agree and are shown."""
    found = results(folder)
    assert found["gate"]["passed"]
    assert {row["row"]: len(row["seeds"]) for row in found["rows"]} == {other: 1, hub: 1}
    assert hub in (folder / "report.html").read_text()
    assert not (folder / "conductor.json").exists()
    return found


@pytest.mark.full
def test_torchrun_starts_a_comparison_of_its_tasks(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = cluster.start(
        "torchrun", [*torchrun(2), sys.executable, "-m", COMPARE, *WORDS, "--out", str(out)]
    )
    assert program.wait(PATIENT) == 0, program.said()
    found = compared(out)
    assert found["machine"]["launcher"] == "torchrun"
    assert [host["ranks"] for host in found["machine"]["hosts"].values()] == ["0, 1"]
    assert "rank 1 on" in program.said()
    assert "follows 127.0.0.1:" in program.said()


def test_srun_starts_a_comparison_with_a_shard_and_an_idle_task(
    slurm: Slurm, cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [*WORDS, "--workers", "2", "--servers", "2", "--out", str(out)]
    there = f"SLURM_CONF={slurm.environment['SLURM_CONF']}"
    command = ["env", there, "srun", "-N3", "-n3", sys.executable, "-m", COMPARE, *words]
    program = cluster.start("srun", command)
    assert program.wait(PATIENT) == 0, program.said()
    found = compared(out)
    assert found["machine"]["launcher"] == "slurm"
    hub = next(lines for label, lines in found["commands"].items() if "hub-bsp" in label)
    assert [line.count("--join") for line in hub] == [0, 1, 0, 0]
    assert not any("127.0.0.1" in line for line in hub)


def on_machines(folder: Path, clocks: dict[str, int]) -> Path:
    """Writes a script that runs its arguments on a machine of its own on each node.

    Args:
        folder: Where to write it.
        clocks: Seconds by which the clock of each node is ahead.
    """
    prefixes = {name: shlex.join(machine(name, folder, ahead)) for name, ahead in clocks.items()}
    cases = [f'{name}) exec {prefix} "$@";;' for name, prefix in prefixes.items()]
    script = folder / "node.sh"
    script.write_text("\n".join(['case "$SLURMD_NODENAME" in', *cases, "esac"]))
    return script


@pytest.mark.parametrize("ahead", [pytest.param(3, marks=NEED_MACHINES)])
def test_srun_starts_an_experiment_on_nodes_whose_clocks_differ(
    slurm: Slurm, cluster: Cluster, tmp_path: Path, ahead: int
) -> None:
    out, script = tmp_path / "out", on_machines(tmp_path, {"n0": 0, "n1": ahead})
    words = ["run", str(write_experiment(tmp_path)), "--out", str(out)]
    there = f"SLURM_CONF={slurm.environment['SLURM_CONF']}"
    nodes = ["srun", "--nodelist=n0,n1", "--ntasks=2", "--ntasks-per-node=1"]
    command = ["env", there, *nodes, "sh", str(script), sys.executable, "-m", COMPARE, *words]
    program = cluster.start("srun", command)
    assert program.wait(PATIENT) == 0, program.said()
    found = reported(out)
    assert found["machine"]["launcher"] == "slurm"
    assert [clock["name"] for clock in found["clocks"]] == ["n0", "n1"]
    aligned(out, ahead, ["worker 0 on n0", "worker 1 on n1"])


def task(cluster: Cluster, rank: int, out: Path, name: str) -> Program:
    """One of two tasks, as an operator of Kubernetes starts them."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    rows = "--rows=local,hub-aggregate"  # one worker alone does not wait for the file
    words = measured(60, rows, "--seeds=1", "--out", str(out), go=out.with_name("go"))
    return cluster.run(f"{name} {rank}", COMPARE, *words, variables=place)


@pytest.mark.full
@pytest.mark.parametrize(("killed", "says"), [(1, "rank 1 on "), (0, "rank 0 at 127.0.0.1:")])
def test_a_task_that_is_killed_ends_the_others_and_the_rest_is_run_later(
    cluster: Cluster, tmp_path: Path, killed: int, says: str
) -> None:
    out = tmp_path / "out"
    tasks = [task(cluster, rank, out, "first") for rank in range(2)]
    record = out / "runs" / "n2 k1 hub-aggregate seed1" / "record 1.jsonl"
    tasks[0].until(lambda: record.exists() and record.stat().st_size > 0, "the second run", PATIENT)
    tasks[killed].process.send_signal(signal.SIGKILL)
    error = tasks[1 - killed].done(1, PATIENT)["error"]
    assert says in error
    assert "is lost" in error
    out.with_name("go").touch()
    later = [task(cluster, rank, out, "later") for rank in range(2)]
    assert [program.done(0, PATIENT)["exit_code"] for program in later] == [0, 0]
    assert "n2 k1 local seed1: already finished" in later[0].said()
    compared(out, "local", "hub-aggregate")
    # that no worker of the killed one is left is seen to by the fixture no_process_outlives_its_test


@pytest.mark.full
def test_too_few_tasks_are_told_with_both_numbers(cluster: Cluster, tmp_path: Path) -> None:
    words = [*WORDS, "--workers", "3", "--out", str(tmp_path / "out")]
    program = cluster.run("compare", COMPARE, *words, variables={"RANK": "0", "WORLD_SIZE": "2"})
    assert "has 3 workers, but environment started 2 tasks" in program.done(2, PATIENT)["error"]
