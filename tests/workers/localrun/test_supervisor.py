"""A job starts again after a loss, a few times without a newer checkpoint."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubring.ps.core.errors import ServerUnreachable
from hubring.workers.localrun.supervisor import AttemptEnd, Supervisor

KILLED = AttemptEnd(137, "rank 1 was killed by signal 9 (SIGKILL)")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**6, 100)).__next__)


def save(folder: Path, number: int, step: int) -> None:
    (folder / f"{number:06d}-step-{step}").mkdir(parents=True)


def test_each_restart_is_one_line_with_cause_step_and_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, 40)
    job = Supervisor(3, tmp_path)
    ends = [KILLED, AttemptEnd(69, "the server exited with 69"), AttemptEnd(0)]
    assert job.run(iter(ends).__next__) == AttemptEnd(0)
    assert capsys.readouterr().err.splitlines() == [
        "ps-run: rank 1 was killed by signal 9 (SIGKILL); restarting the job in 1 s from the checkpoint of"
        " step 40 (2 restarts left)",
        "ps-run: the server exited with 69; restarting the job in 2 s from the checkpoint of step 40"
        " (1 restart left)",
    ]
    assert job.restarts == 2


def test_restarts_without_progress_run_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Supervisor(2, tmp_path)
    assert job.run(iter([KILLED] * 3).__next__) == KILLED
    said = capsys.readouterr().err
    assert said.count("at step 0, because there is no checkpoint yet") == 2
    assert said.splitlines()[-1] == "ps-run: no restart is left after 2; --restarts N sets their number"


def test_a_newer_checkpoint_allows_all_restarts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def endings() -> Iterator[AttemptEnd]:
        for number in range(1, 6):
            save(tmp_path, number, 10 * number)
            yield KILLED
        yield AttemptEnd(0)

    job = Supervisor(1, tmp_path)
    assert job.run(endings().__next__).code == 0
    assert job.restarts == 5
    assert re.findall(r"step (\d+) \((\d) restart", capsys.readouterr().err) == [
        (str(10 * number), "0") for number in range(1, 6)
    ]


@pytest.mark.parametrize(
    "ending", [AttemptEnd(1, "rank 0 exited with 1"), AttemptEnd(78), AttemptEnd(75, asked=True)]
)
def test_a_failure_and_a_wish_are_not_restarted(
    tmp_path: Path, ending: AttemptEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Supervisor(3, tmp_path).run(iter([ending]).__next__) == ending
    assert capsys.readouterr().err == ""


def test_a_lost_job_without_checkpoints_says_what_would_restart_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Supervisor(0, None).run(iter([KILLED]).__next__) == KILLED
    assert "the job is lost; with --checkpoint-dir DIR it starts again" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> AttemptEnd:
        raise ServerUnreachable("the server did not start")

    with pytest.raises(ServerUnreachable):
        Supervisor(2, tmp_path).run(refuse)
    assert capsys.readouterr().err.count("the server did not start; restarting the job") == 2


def test_a_signal_while_it_waits_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    assert Supervisor(3, tmp_path).run(iter([KILLED]).__next__) == AttemptEnd(75, asked=True)
