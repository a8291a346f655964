"""A Compose job goes on after the loss of a process. `HUBRING_KILLS=20` kills as many of each kind."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.deploy.conftest import Yard
from tests.deploy.fleet import Fleet
from tests.deploy.image import IMAGE
from tests.support.processes.process_tree import by_age, command
from tests.support.submissions import program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6000)]

KILLS = int(os.environ.get("HUBRING_KILLS", "1"))
EPOCHS = 300
"""Enough that a lost worker comes back before the others finish."""
PROGRAMS = {
    "server": "-m hubring.ps.cli start",
    "shard": "-m hubring.ps.shard.process",
    "worker": "-m hubring.workers.programs.ps_worker",
}


def kill(yard: Yard, victim: str, number: int) -> None:
    """Kills a program in a container, as the kernel does when memory is short; its supervisor stays."""
    found = by_age(pid for pid in yard.engine.processes() if PROGRAMS[victim] in command(pid))
    assert found, f"no {victim}"
    os.kill(found[number % len(found)], signal.SIGKILL)


@pytest.mark.parametrize(
    ("topology", "victim"),
    [("hub", "server"), ("hub", "shard"), ("hub", "worker"), ("ring", "server"), ("ring", "worker")],
)
def test_a_job_that_lost_a_process_ends_with_0(
    yard: Yard, tmp_path: Path, capsys: pytest.CaptureFixture[str], topology: str, victim: str
) -> None:
    flags = ["--workers", "2", "--image", IMAGE, "--topology", topology, "--cpus", "1"]
    saves = ["--checkpoint-dir", "/checkpoints", "--checkpoint-every", "0.5"]
    words = ["--engine", "compose", "--dry-run", *flags, *saves, "--", "--epochs", str(EPOCHS)]
    assert program(*words) == 0
    file = tmp_path / "job.yaml"
    file.write_text(capsys.readouterr().out)
    for number in range(KILLS):
        chosen = random.Random(f"{topology} {victim} {number}")
        job = Fleet(yard.engine, yard.source, f"lost{number}", file=file)
        try:
            job.run("up", "--no-color", "--detach")
            step = chosen.randrange(1, 200)
            job.until_step(step)
            kill(yard, victim, chosen.randrange(2))
            everyone = [*job.containers("server"), *job.containers("worker")]
            codes = [int(yard.engine.run("wait", one["Id"])) for one in everyone]
            (server,) = job.containers("server")
            assert codes == [0, 0, 0], job.said()
            assert job.result(server)["finished"] == [0, 1]
            assert "; restarting it in " in job.said()
            print(f"{topology} {victim} {number}: killed at step {step} or later; ended with 0")
        finally:
            job.down()
