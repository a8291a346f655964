"""ps-run starts a job again that lost any one process, and the job ends in the same bytes."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.restarts.kills import FLAGS, PS_RUN, STEPS, VICTIMS, Job, same
from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.processes.process_tree import below, parent, runs

pytestmark = pytest.mark.slow

PS_WORKER = "hubring.workers.programs.ps_worker"
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


def ps_run(cluster: Cluster, *words: str) -> Program:
    return cluster.run("run", PS_RUN, "-n", "2", "--restarts", "3", *words)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["hub", "ring"])
def test_a_stopped_worker_is_ended_before_the_restart(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    go = tmp_path / "go"
    hold = ("hold", str(go), str(STEPS - 5))
    job = Job(cluster, tmp_path / "job", kind, *PACE, *hold, flags=("--lease", "5"))
    job.until_saved(1)
    (first, second) = job.processes("worker")
    os.kill(second, signal.SIGSTOP)
    job.until_restarted()
    assert not {first, second} & set(job.processes("worker"))
    go.touch()
    assert job.parameters()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["hub", "ring"])
def test_a_job_that_stops_on_request_is_not_restarted(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """The request comes from the status page, or as here from a scheduler that warns one process."""
    job = Job(cluster, tmp_path / "job", kind, *PACE, "hold", str(tmp_path / "go"), str(STEPS - 5))
    job.until_saved(1)
    os.kill(job.processes("worker")[0], signal.SIGUSR1)
    (tmp_path / "go").touch()
    assert job.program.wait() == 75, job.program.said()
    assert not job.restarts
    assert "ps-run: stopped on request after" in job.program.said().splitlines()[-1]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["hub", "ring"])
def test_a_script_that_fails_is_not_restarted(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    script = tmp_path / "small.py"
    script.write_text(Path(SMALL).read_text().replace("loss.backward()", "loss.backward(); 1 / (step < 10)"))
    program = ps_run(cluster, *FLAGS[kind], str(script), "60")
    assert program.wait() == 1, program.said()
    assert "restarting" not in program.said()
    assert "exited with 1; stopping the other workers" in program.said()


@pytest.mark.full
def test_children_of_a_killed_worker_end_before_the_restart(cluster: Cluster, tmp_path: Path) -> None:
    """What a DataLoader leaves behind would hold files, and its outputs."""
    script, children = tmp_path / "parent.py", tmp_path / "children"
    script.write_text(
        "import hubring, os, signal, subprocess, sys\n"
        "hubring.init()\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "with open(sys.argv[1], 'a') as file:\n"
        "    print(child.pid, file=file)\n"
        "if len(open(sys.argv[1]).readlines()) == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "child.kill()\n"
    )
    program = cluster.run("run", PS_RUN, "--restarts", "1", str(script), str(children))
    assert program.wait() == 0, program.said()
    first, _ = map(int, children.read_text().split())
    assert not parent(first)
    assert "at step 0, because no --checkpoint-dir is set (0 restarts left)" in program.said()


TAIL = """
import sys, time
from pathlib import Path
import hubring
from tests.support.scripts import small

go = Path(sys.argv.pop(1))
small.main()
while hubring.rank() and not go.exists():
    time.sleep(0.02)
"""


@pytest.mark.parametrize("kind", ["hub", pytest.param("ring", marks=pytest.mark.full)])
def test_a_worker_that_is_killed_after_it_finished_is_no_loss(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    script, go = tmp_path / "tail.py", tmp_path / "go"
    script.write_text(TAIL)
    program = ps_run(cluster, *FLAGS[kind], str(script), str(go), "5")
    program.until_said("training has finished; waiting for rank 1")
    finished = min(pid for pid in below(program.process.pid) if runs(pid, PS_WORKER))
    os.kill(finished, signal.SIGKILL)
    program.until_said("ps-run: rank 0 was killed by signal 9 (SIGKILL) after it had finished")
    go.touch()
    assert program.wait() == 0, program.said()
    assert "2 workers finished 5 steps" in program.said().splitlines()[-1]
    assert "restart" not in program.said()
