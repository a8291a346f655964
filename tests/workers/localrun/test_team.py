"""A team sees each end at once, whichever process still holds the outputs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from hubring.ps.process.child import Child
from hubring.ps.process.screen import Screen
from hubring.workers.localrun import team

# Rank 0 leaves a process behind that holds its outputs; once rank 0 has ended, rank 1 fails.
JOB = """
import os, sys
from hubring.workers.localrun import team
team.HEAR_SECONDS = 0.1
lines = "exec 9>fifo; sleep 600 9>&- & echo left $!", "read line <fifo; exit 7", "exec sleep 600"
commands = [("sh", "-c", line) for line in lines]
sys.exit(team.Team(commands, [dict(os.environ)] * 3).run(print))
"""


@pytest.mark.timeout(60)
def test_a_failure_is_seen_though_a_rank_that_ended_left_its_outputs_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(
        [sys.executable, "-c", JOB], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        said, warned = job.communicate()
    left = re.search(r"\[0\]<stdout>:left (\d+)\n", said)
    assert left, said
    os.kill(int(left[1]), signal.SIGKILL)
    assert re.search(r"rank 1 \(pid \d+\) stopping the other workers\n", said), said
    assert (job.returncode, warned) == (7, "")


# The end of one process explains those of the others, whatever order they are noticed in.
CAUSE = """
import os, sys
from hubring.ps.process.child import Child
from hubring.workers.localrun import team
server = Child("the server", ("sh", "-c", sys.argv[1]))
commands = [("sh", "-c", line) for line in sys.argv[2:]]
job = team.Team(commands, [dict(os.environ)] * len(commands), server=server)
code = job.run(lambda child, verdict: print(child.name, child.ended))
server.kill()
sys.exit(code)
"""
STAYS = "exec sleep 600"


@pytest.mark.parametrize(
    ("lines", "cause", "code"),
    [
        (["kill -9 $$", STAYS, STAYS], "the server was killed by signal 9 (SIGKILL)", 137),
        ([STAYS, "exit 69", "read line <fifo; exit 3"], "rank 1 exited with 3", 3),
        ([STAYS, "exit 69", "read line <fifo; kill -9 $$"], "rank 1 was killed by signal 9 (SIGKILL)", 137),
        ([STAYS, "exit 69", "read line <fifo; exit 69"], "rank 0 exited with 69", 69),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_one_end_explains_the_others(tmp_path: Path, lines: list[str], cause: str, code: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    first = lines[1].replace("exit 69", "(sleep 0.3; echo >fifo) & exit 69")
    with subprocess.Popen(
        [sys.executable, "-c", CAUSE, lines[0], first, lines[2]],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        said, _ = job.communicate()
    assert (said, job.returncode) == (f"{cause}\n", code)


class Listener(Child):
    """A child that runs nothing, and notes its signals."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)


def test_workers_get_one_sigterm_though_both_outputs_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def screens(on_failure: Callable[[OSError], None]) -> tuple[Screen, Screen]:
        return Screen(BytesIO(), on_failure), Screen(BytesIO(), on_failure)

    monkeypatch.setattr(team, "_screens", screens)
    monkeypatch.setattr(sys, "stdin", None)
    job, worker = team.Team([], []), Listener()
    job._workers.started.append(worker)  # type: ignore[arg-type]
    for screen in job._screens:
        screen.fail(BrokenPipeError())
    assert worker.signals == [signal.SIGTERM]
    job.signal(signal.SIGINT)
    assert worker.signals == [signal.SIGTERM, signal.SIGINT]
    assert job._quit_at == float("inf"), "the first signal of the user does not hurry the workers"
    job.signal(signal.SIGINT)
    assert job._quit_at < float("inf")
