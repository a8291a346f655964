"""The batch script that `ps-server submit` prints, on a real SLURM of four slurmd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hubring.ps.checkpoint.checkpoint_folder import newest_step
from tests.launchers.commands import told
from tests.launchers.slurm import Slurm
from tests.support.processes.cluster import SMALL
from tests.support.processes.process_tree import command, descendants, entry

pytestmark = pytest.mark.slow

RING = ["--topology", "ring"]


class Submitted:
    """A job that is submitted from a folder of its own, and its output there."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.slurm, self.folder = slurm, folder
        self.number = ""
        programs = str(Path(sys.executable).parent)  # ps-server and ps-worker are beside this Python
        self.environment = {**slurm.environment, "PATH": f"{programs}:{os.environ['PATH']}"}

    def submit(self, *words: str) -> dict[str, Any]:
        """By `ps-server submit`, which hands it to sbatch."""
        last = json.loads(self._run(*self._words(*words)).splitlines()[-1])
        self.number = last["said"].rpartition(" ")[2]
        assert self.number.isdecimal(), last
        return last

    def submit_printed(self, *words: str) -> None:
        """By sbatch, of the file that `ps-server submit --dry-run` prints."""
        script = self.folder / "job.sbatch"
        script.write_text(self._run(*self._words("--dry-run", *words)))
        self.number = self._run("sbatch", "--parsable", str(script)).strip()

    def until_said(self, words: str, count: int = 1) -> None:
        self._until(lambda: self.said().count(words) >= count, words)

    def until_saved(self, folder: str, step: int) -> None:
        """Waits for a checkpoint of at least this step in a folder of the job's."""
        self._until(lambda: (newest_step(self.folder / folder) or 0) >= step, f"checkpoint of step {step}")

    def until_state(self, *states: str) -> str:
        """Waits for one of these states; returns which."""
        self._until(lambda: self.slurm.state(self.number) in states, " or ".join(states))
        return self.slurm.state(self.number)

    def ended(self) -> int:
        """Waits for the end; the exit code of the batch script."""
        self.until_state("COMPLETED", "FAILED", "CANCELLED")
        shown = self.slurm.ask("scontrol", "show", "job", self.number)
        return int(shown.partition("ExitCode=")[2].partition(":")[0])

    def said(self) -> str:
        out = self.folder / "job.out"
        return out.read_text() if out.exists() else ""

    def result(self) -> dict[str, Any]:
        """The server's, which is the job's last line."""
        last: dict[str, Any] = json.loads(self.said().splitlines()[-1])
        return last

    def _words(self, *words: str) -> list[str]:
        option = "#SBATCH --output=job.out"
        start = ["ps-server", "submit", "--engine", "slurm", "--workers", "4", "--nodes", "4"]
        return [*start, "--engine-option", option, *words]

    def _run(self, *words: str) -> str:
        ran = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            self.slurm.until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None


def finished(job: Submitted, steps: int) -> None:
    assert job.ended() == 0, job.said()
    ranks = [(one["rank"], one["size"], one["steps"]) for one in told(job.said())]
    assert ranks == [(rank, 4, steps) for rank in range(4)]
    assert (job.result()["finished"], job.result()["exit_code"]) == ([0, 1, 2, 3], 0)
    assert not list(job.folder.glob("hubring-*"))


@pytest.mark.parametrize("flags", [["--shards", "2"], ["--colocate"], RING], ids=["hub", "colocated", "ring"])
def test_sbatch_runs_what_was_printed(slurm: Slurm, tmp_path: Path, flags: list[str]) -> None:
    job = Submitted(slurm, tmp_path)
    job.submit_printed(*flags, "--", SMALL, "10")
    finished(job, 10)


def test_submit_hands_the_job_to_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path)
    last = job.submit("--", SMALL, "10")
    assert last["said"] == f"Submitted batch job {job.number}"
    finished(job, 10)


def test_a_hub_goes_on_without_a_worker_that_is_killed_and_the_job_succeeds(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Submitted(slurm, tmp_path)
    go = tmp_path / "go"
    job.submit_printed("--", SMALL, "40", "16", "hold", str(go), "10")
    job.until_said("holding at 10", 4)
    kill(job, 3)
    job.until_said("the job continues with 3 of 4 workers")
    go.touch()
    assert job.ended() == 0, job.said()
    assert (job.result()["finished"], list(job.result()["lost"])) == ([0, 1, 2], ["3"])


def test_a_ring_without_one_of_its_members_fails(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path)
    go = tmp_path / "go"
    job.submit_printed(*RING, "--", SMALL, "40", "16", "hold", str(go), "10")
    job.until_said("holding at 10", 4)
    kill(job, 3)
    go.touch()
    assert job.ended() == 69, job.said()
    assert "rank 3" in job.result()["error"]


def test_a_script_that_is_not_there_ends_the_job_with_2(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path)
    job.submit_printed("--", "nowhere.py")
    assert job.ended() == 2, job.said()
    assert "script nowhere.py not found" in job.said()


def test_scancel_saves_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    before = descendants()
    job = Submitted(slurm, tmp_path)
    go = tmp_path / "go"
    job.submit_printed(
        "--requeue", "--checkpoint-dir", "kept", "--", SMALL, "60", "16", "hold", str(go), "20"
    )
    job.until_said("holding at 20", 4)
    slurm.ask("scancel", job.number)
    job.until_said("SIGTERM: all workers stop after the same step", 4)
    go.touch()
    job.until_state("CANCELLED")
    slurm.until(lambda: not descendants() - before, "end of all processes")
    assert "checkpoint of step" in job.said()
    assert not list(tmp_path.glob("hubring-*"))


@pytest.mark.parametrize("flags", [[], RING], ids=["hub", "ring"])
def test_a_job_that_got_notice_is_requeued_and_goes_on_to_the_same_bytes(
    slurm: Slurm, tmp_path: Path, flags: list[str]
) -> None:
    words = [*flags, "--requeue", "--checkpoint-dir", "kept", "--save-parameters", "final.safetensors"]
    whole = Submitted(slurm, tmp_path / "whole")
    whole.submit_printed(*words, "--", SMALL, "60")
    finished(whole, 60)
    go = tmp_path / "go"
    job = Submitted(slurm, tmp_path / "parted")
    job.submit_printed(*words, "--", SMALL, "60", "16", "hold", str(go), "20")
    job.until_said("holding at 20", 4)
    slurm.ask("scancel", "--signal=USR1", job.number)  # as --signal=USR1@120 sends it
    job.until_said("SIGUSR1: all workers stop after the same step", 4)
    go.touch()
    job.until_state("PENDING")
    # SLURM lets the old credential run out first, for two minutes; one of a later second replaces it too.
    slurm.ask("scontrol", "update", f"jobid={job.number}", "starttime=now+3")
    assert job.until_state("COMPLETED", "FAILED") == "COMPLETED", job.said()
    assert job.result()["finished"] == [0, 1, 2, 3]
    assert job.said().count("slurm restarted this job: restart 1") == 4
    expected, got = (load_file(one.folder / "final.safetensors") for one in (whole, job))
    assert expected.keys() == got.keys()
    assert all(expected[name].equal(got[name]) for name in expected)


def kill(job: Submitted, rank: int) -> None:
    """Kills one task of the workers' step, as an out-of-memory killer would."""
    mine = {f"SLURM_PROCID={rank}", f"SLURM_JOB_ID={job.number}"}
    for pid in descendants():
        if "/ps-worker --server " in command(pid) and mine <= variables(pid):
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"no task of rank {rank}:\n{job.said()}")


def variables(pid: int) -> set[str]:
    """Of a process; none if it has ended."""
    return set(entry(pid, "environ").split("\0"))
