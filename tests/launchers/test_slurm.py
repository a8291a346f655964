"""srun, on a real SLURM of four slurmd."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.launchers.commands import told, worker
from tests.launchers.slurm import Slurm
from tests.support.processes.cluster import SMALL, Cluster

pytestmark = pytest.mark.slow


def test_srun_tells_every_task_its_place(slurm: Slurm, tmp_path: Path) -> None:
    # A file each: srun joins what tasks print in lines beyond a kilobyte.
    layout = ["-N2", "-n4", "--ntasks-per-node=2", f"--output={tmp_path}/%t.json"]
    asked = subprocess.run(
        ["srun", *layout, *worker("env", "--json")],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert asked.returncode == 0, asked.stderr
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    fields = ("rank", "world size", "local rank", "local size", "node rank", "launcher")
    assert sorted([report[field]["value"] for field in fields] for report in reports) == [
        [0, 4, 0, 2, 0, "slurm"],
        [1, 4, 1, 2, 0, "slurm"],
        [2, 4, 0, 2, 1, "slurm"],
        [3, 4, 1, 2, 1, "slurm"],
    ]
    assert {report["local rank"]["source"] for report in reports} == {"SLURM_LOCALID=0", "SLURM_LOCALID=1"}


def test_srun_starts_the_same_command(slurm: Slurm, cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--once")
    command = ["srun", "-N4", *worker("--server", address, SMALL, "10")]
    ran = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    results = told(ran.stdout)
    assert [(one["rank"], one["size"], one["steps"]) for one in results] == [(r, 4, 10) for r in range(4)]
    assert server.done()["finished"] == [0, 1, 2, 3]
