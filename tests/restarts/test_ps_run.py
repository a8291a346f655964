"""ps-run starts a job again that lost any one process, and the job ends in the same bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.restarts.kills import STEPS, VICTIMS, Job, same
from tests.support.processes.cluster import Cluster

pytestmark = pytest.mark.slow

PACE = ("pace", "0.02")
WORDS = {"server": "the server", "shard": "", "worker": "rank "}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", VICTIMS)
def test_a_job_that_lost_any_one_process_ends_in_the_same_bytes(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    whole = Job(cluster, tmp_path / "whole", kind).parameters()
    for victim in VICTIMS[kind]:
        chosen = random.Random(f"{kind} {victim}")
        step, number, go = chosen.randrange(1, STEPS // 2), chosen.randrange(2), tmp_path / f"{victim}-go"
        job = Job(cluster, tmp_path / victim, kind, *PACE, "hold", str(go), str(STEPS - 5))
        job.until_saved(step)
        saved = job.step
        assert job.kill(victim, number)
        job.until_restarted()
        go.touch()
        assert same(whole, job.parameters())
        (line,) = job.restarts
        assert line.startswith(f"ps-run: {WORDS[victim]}"), line
        assert "restarting the job in 1 s from the checkpoint of step " in line
        assert int(line.partition("step ")[2].split()[0]) >= saved
        assert line.endswith("(2 restarts left)")
        assert "2 workers finished 80 steps" in job.program.said().splitlines()[-1]
        assert " with 1 restart" in job.program.said().splitlines()[-1]
