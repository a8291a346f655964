"""The batch script that `ps-server submit` prints, on a real SLURM of four slurmd."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launchers.slurm import Slurm
from tests.launchers.submitted import RING, Submitted, finished, holding
from tests.support.processes.cluster import SMALL
from tests.support.processes.process_tree import descendants

pytestmark = pytest.mark.slow
RANK_3 = "/ps-worker --server ", 0, "SLURM_PROCID=3"


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
    go = holding(job)
    job.kill(*RANK_3)
    job.until_said("the job continues with 3 of 4 workers")
    go.touch()
    assert job.ended() == 0, job.said()
    assert (job.result()["finished"], list(job.result()["lost"])) == ([0, 1, 2], ["3"])


def test_a_ring_without_one_of_its_members_fails(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path)
    go = holding(job, *RING)
    job.kill(*RANK_3)
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
    go = holding(job, "--requeue", "--checkpoint-dir", "kept", steps=60, at=20)
    slurm.ask("scancel", job.number)
    job.until_said("SIGTERM: all workers stop after the same step", 4)
    go.touch()
    job.until_state("CANCELLED")
    slurm.until(lambda: not descendants() - before, "end of all processes")
    assert "checkpoint of step" in job.said()
    assert not list(tmp_path.glob("hubring-*"))


@pytest.mark.parametrize(
    ("flags", "notice", "signal"),
    [
        pytest.param([], ["scancel", "--signal=USR1"], "SIGUSR1", id="hub, as --signal=USR1@120 sends it"),
        pytest.param(RING, ["scontrol", "requeue"], "SIGTERM", id="ring, requeued by an administrator"),
    ],
)
def test_a_job_that_got_notice_is_requeued_and_goes_on_to_the_same_bytes(
    slurm: Slurm, tmp_path: Path, flags: list[str], notice: list[str], signal: str
) -> None:
    words = [*flags, "--requeue", "--checkpoint-dir", "kept", "--save-parameters", "final.safetensors"]
    whole = Submitted(slurm, tmp_path / "whole")
    whole.submit_printed(*words, "--", SMALL, "60")
    finished(whole, 60)
    job = Submitted(slurm, tmp_path / "parted")
    go = holding(job, *words, steps=60, at=20)
    slurm.ask(*notice, job.number)
    job.until_said(f"{signal}: all workers stop after the same step", 4)
    go.touch()
    job.complete_again()
    assert job.result()["finished"] == [0, 1, 2, 3]
    assert job.said().count("slurm restarted this job: restart 1") == 4
    expected, got = (load_file(one.folder / "final.safetensors") for one in (whole, job))
    assert expected.keys() == got.keys()
    assert all(expected[name].equal(got[name]) for name in expected)
