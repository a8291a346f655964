"""A team sees each end at once, whichever process still holds the outputs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hubring.ps.process.child import Child, passing_on
from hubring.ps.process.output import SharedScreen
from hubring.workers.localrun import job, server, team
from hubring.workers.localrun.command_line import ScriptCommand
from hubring.workers.localrun.job import LocalJob
from hubring.workers.localrun.server import LocalServer
from hubring.workers.localrun.settings import settle
from hubring.workers.localrun.supervisor import FailurePolicy, FailureResponse, JobReport

# Rank 0 leaves a process behind that holds its outputs; once rank 0 has ended, rank 1 fails.
JOB = """
import os, sys
from hubring.workers.localrun import team
team.HEAR_SECONDS = 0.1
lines = "exec 9>fifo; sleep 600 9>&- & echo left $!", "read line <fifo; exit 7", "exec sleep 600"
commands = [("sh", "-c", line) for line in lines]
sys.exit(team.LocalTeam(commands, [dict(os.environ)] * 3).run(print))
"""


@pytest.mark.usefixtures("forked_pythons")
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
job = team.LocalTeam(commands, [dict(os.environ)] * len(commands), server=server)
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
@pytest.mark.usefixtures("forked_pythons")
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


@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.slow
def test_an_object_that_a_killed_worker_printed_last_is_shown() -> None:
    command = [sys.executable, "-c", CAUSE, STAYS, """echo '{"loss": 3}'; kill -9 $$"""]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert '[0]<stdout>:{"loss": 3}\n' in ended.stdout
    assert ended.returncode == 128 + signal.SIGKILL


# The workers and the server's job have ended as the signal asked, but one worker ignores it.
STUCK = """
import os, signal, sys
from hubring.ps.process.child import Child
from hubring.workers.localrun import team
signal.signal(signal.SIGTERM, signal.SIG_IGN)
team.SERVERLESS_SECONDS = 0.1
server = Child("the server", ("sh", "-c", "exit 75"))
job = team.LocalTeam([("sh", "-c", "exec sleep 600")], [dict(os.environ)], server=server)
job.signal(signal.SIGTERM)
sys.exit(job.run(print))
"""


@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.timeout(60)
def test_a_worker_that_ignores_a_signal_ends_after_its_server() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], check=False)
    assert ended.returncode == 128 + signal.SIGTERM


STAYS_SERVER = """trap "" TERM; echo '{"steps": 7}'; echo here >"$2"; sleep 600"""
ENDS_SERVER = """echo '{"steps": 7}'; echo here >"$2"; read line <fifo; exit %d"""


@pytest.mark.parametrize(
    ("script", "joined", "newest", "code", "said"),
    [
        (STAYS_SERVER, True, 7, 0, "did not end in time and was killed; the newest checkpoint is of step 7"),
        (STAYS_SERVER, False, -1, 1, "did not end in time and was killed; there is no checkpoint"),
        (ENDS_SERVER % 75, False, 5, 1, "leaving the job, at step 7; the newest checkpoint is of step 5"),
        (ENDS_SERVER % 75, False, 7, 0, ""),
        (ENDS_SERVER % 69, True, 7, 69, "the server exited with 69; the newest checkpoint is of step 7"),
        (ENDS_SERVER % 0, True, 7, 0, ""),
    ],
)
@pytest.mark.timeout(60)
def test_a_job_reports_a_server_that_ended_badly_and_what_it_lost(
    script: str,
    joined: bool,
    newest: int,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "module_command", lambda *_: ["sh", "-c", script, "server"])
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with LocalServer(1, [], dict(os.environ)) as ended:
        if "fifo" in script:
            Path("fifo").write_text("end\n")
            ended.process.wait()
    report = JobReport(1, settle({"checkpoint_dir": tmp_path}, 1, {}))
    assert report.server_end(ended, 0, {0: {}} if joined else {}, newest) == code
    printed = capsys.readouterr().err
    assert said in printed
    assert bool(said) == bool(printed)


def test_a_signal_while_the_server_ends_stops_restarts_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending = SimpleNamespace(address="", process=None, has_finished=None)
    ending.end = lambda _: signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(job, "LocalServer", lambda *_, **__: nullcontext(ending))
    monkeypatch.setattr(team.LocalTeam, "run", lambda *_: 3)
    monkeypatch.setattr(sys, "stdin", None)
    rest: Any = settle({}, 1, {}), None, None, None
    with passing_on([signal.SIGTERM], lambda _: pytest.fail("the job was not asked")):
        ended = LocalJob()._attempt(1, ScriptCommand(["train.py"]), *rest)
    assert (ended.code, ended.asked) == (3, True)


class Listener(Child):
    """A child that runs nothing, and notes its signals."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)


def test_workers_get_one_sigterm_though_both_outputs_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def screens(on_failure: Callable[[OSError], None]) -> tuple[SharedScreen, SharedScreen]:
        return SharedScreen(BytesIO(), on_failure), SharedScreen(BytesIO(), on_failure)

    monkeypatch.setattr(team, "_screens", screens)
    monkeypatch.setattr(sys, "stdin", None)
    workers, worker = team.LocalTeam([], []), Listener()
    workers._workers.started.append(worker)  # type: ignore[arg-type]
    workers._server = SimpleNamespace(code=0)  # type: ignore[assignment]
    workers._watch_stopping()
    assert workers._quit_at == float("inf"), "workers may go on after the server's end"
    for screen in workers._screens:
        screen.fail(BrokenPipeError())
    assert worker.signals == [signal.SIGTERM]
    workers.signal(signal.SIGINT)
    assert worker.signals == [signal.SIGTERM, signal.SIGINT]
    assert workers._quit_at == float("inf"), "the first signal of the user does not hurry the workers"
    workers.signal(signal.SIGINT)
    assert workers._quit_at < float("inf")


def test_a_lost_worker_is_restarted_while_another_has_the_state() -> None:
    patience = FailurePolicy(least=2, restarts=2)
    assert patience.verdict(running=1, finished=0) is FailureResponse.RESTART
    assert patience.verdict(running=1, finished=1) is FailureResponse.WITHOUT
    assert patience.verdict(running=0, finished=0) is FailureResponse.END
    assert patience.verdict(running=2, finished=0) is FailureResponse.RESTART
    assert patience.verdict(running=2, finished=0) is FailureResponse.WITHOUT
    assert patience.verdict(running=1, finished=0) is FailureResponse.END


def test_without_elastic_training_the_first_failure_ends_all() -> None:
    assert FailurePolicy(least=3).verdict(running=2, finished=0) is FailureResponse.END
    assert not LocalJob(num_proc=3).elastic
    assert LocalJob(num_proc=3, min_num_proc=1).elastic
