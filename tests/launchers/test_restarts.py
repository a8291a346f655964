"""The batch script queues a job again that lost a process. `HUBRING_KILLS=20` kills as many of each kind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.launchers.slurm import Slurm
from tests.launchers.submitted import RING, Submitted, finished
from tests.support.processes.cluster import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

KILLS = int(os.environ.get("HUBRING_KILLS", "1"))
STEPS = 60
PROGRAMS = {
    "server": "/ps-server start ",
    "shard": "hubring.ps.shard.process",
    "worker": "/ps-worker --server ",
}
KEPT = ["--checkpoint-dir", "kept", "--checkpoint-every", "0.5", "--save-parameters", "final.safetensors"]


Undisturbed = Callable[[list[str]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Returns the parameters of a job that lost nothing; with the same flags it runs once."""

    @cache
    def parameters(*flags: str) -> dict[str, Tensor]:
        whole = Submitted(slurm, tmp_path_factory.mktemp("whole"))
        whole.submit_printed(*flags, *KEPT, "--", SMALL, str(STEPS))
        finished(whole, STEPS)
        return load_file(whole.folder / "final.safetensors")

    return lambda flags: parameters(*flags)


@pytest.mark.parametrize(
    ("flags", "victim"),
    [
        pytest.param([], "server", id="hub-server"),
        pytest.param([], "shard", id="hub-shard"),
        pytest.param(["--on-loss", "wait"], "worker", id="hub-worker"),
        pytest.param(RING, "server", id="ring-server"),
        pytest.param(RING, "worker", id="ring-worker"),
    ],
)
def test_a_job_that_lost_a_process_ends_with_0_and_the_same_bytes(
    slurm: Slurm, undisturbed: Undisturbed, tmp_path: Path, flags: list[str], victim: str
) -> None:
    expected = undisturbed(flags)
    for number in range(KILLS):
        chosen = random.Random(f"{flags} {victim} {number}")
        step, rank = chosen.randrange(1, STEPS // 2), chosen.randrange(4)
        job, go = Submitted(slurm, tmp_path / str(number)), tmp_path / f"{number}-go"
        script = [SMALL, str(STEPS), "16", "pace", "0.05", "hold", str(go), str(STEPS - 5)]
        job.submit_printed(*flags, *KEPT, "--", *script)
        job.until_saved("kept/workers" if flags == RING else "kept", step)
        job.kill(PROGRAMS[victim], rank)
        go.touch()
        job.complete_again()
        assert "restart 1 of 3" in job.said()
        got = load_file(job.folder / "final.safetensors")
        assert expected.keys() == got.keys()
        assert all(expected[name].equal(got[name]) for name in expected)
        print(f"{flags} {victim} {number}: killed at a checkpoint of step {step} or later; ended with 0")
