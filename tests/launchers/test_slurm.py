"""srun and scontrol requeue, on a real SLURM of four slurmd."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.launchers.commands import told, worker
from tests.launchers.slurm import Slurm
from tests.support.processes.cluster import SMALL, Cluster

pytestmark = pytest.mark.slow

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4 --ntasks=4 --requeue --open-mode=append
rm -f address
# A step of its own: it outlives this script while the job is being stopped.
srun --overlap -N1 -n1 --output=server.out --error=server.err \\
  {python} -m hubring.ps.cli start --port 0 --workers 4 \\
  --once --slice-bytes 128 --checkpoint-dir saved --address-file address &
until [ -s address ]; do sleep 0.1; done
srun --overlap --output=worker-%t.out --error=worker-%t.err \\
  {python} -m hubring.workers.programs.ps_worker --server "$(cat address)" {flags} \\
  --save-parameters final.safetensors {script} 60 16 {hold}
code=$?; wait
[ $code != 75 ] || scontrol requeue $SLURM_JOB_ID
"""
RING = "--topology ring --checkpoint-dir saved"


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


class Job:
    """One batch job in a folder of its own."""

    def __init__(self, slurm: Slurm, folder: Path, flags: str, *hold: str) -> None:
        folder.mkdir()
        self.slurm, self.folder = slurm, folder
        script = folder / "job.sh"
        text = SCRIPT.format(python=sys.executable, flags=flags, script=SMALL, hold=" ".join(hold))
        script.write_text(text)
        self.number = slurm.batch(script, folder)

    def until(self, name: str, words: str, count: int = 4) -> None:
        def found() -> bool:
            said = [path.read_text() for path in self.folder.glob(name)]
            return sum(words in one for one in said) >= count

        try:
            self.slurm.until(found, words)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def results(self) -> list[dict[str, Any]]:
        """What each rank printed last."""
        outs = sorted(self.folder.glob("worker-*.out"))
        return [json.loads(out.read_text().splitlines()[-1]) for out in outs]

    def done(self) -> dict[str, Tensor]:
        self.slurm.until(lambda: self.slurm.state(self.number) == "COMPLETED", f"end of\n{self.said()}")
        assert [(one["rank"], one["size"], one["steps"]) for one in self.results()] == [
            (rank, 4, 60) for rank in range(4)
        ]
        return load_file(self.folder / "final.safetensors")

    def said(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.[eo]*")))


@pytest.mark.parametrize("flags", ["", RING], ids=["hub", "ring"])
def test_a_requeued_job_goes_on_at_the_same_step_to_the_same_bytes(
    slurm: Slurm, tmp_path: Path, flags: str
) -> None:
    whole = Job(slurm, tmp_path / "whole", flags).done()
    go = tmp_path / "go"
    job = Job(slurm, tmp_path / "parted", flags, "hold", str(go), "20")
    job.until("worker-*.err", "holding at 20")
    slurm.ask("scontrol", "requeue", job.number)
    job.until("worker-*.err", "SIGTERM: all workers stop after the same step")
    go.touch()
    slurm.until(lambda: slurm.state(job.number) == "PENDING", f"requeue of\n{job.said()}")
    stopped = job.results()
    assert {one["exit_code"] for one in stopped} == {75}
    (step,) = {one["steps"] for one in stopped}
    assert 20 < step < 60
    # SLURM lets the old credential run out first, for two minutes; one of a later second replaces it too.
    slurm.ask("scontrol", "update", f"jobid={job.number}", "starttime=now+3")
    parted = job.done()
    said = job.said()
    assert f"checkpoint of step {step} in" in said
    assert f"resumes   step {step} of job" in said or f"continuing from step {step}:" in said
    assert said.count("slurm restarted this job: restart 1") == 4
    assert whole.keys() == parted.keys()
    assert all(whole[name].equal(parted[name]) for name in whole)
