"""A comparison that was interrupted goes on, and repeats nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.core.errors import HubringError, UsageError
from hubring.workers.compare import cli as command
from hubring.workers.compare.comparison import Comparison
from hubring.workers.compare.plan.experiment import LinkTable
from hubring.workers.compare.plan.run_order import PlannedRun, resume_command, runs
from hubring.workers.compare.predict import calibrate
from hubring.workers.compare.run.noise import RunNoise
from hubring.workers.compare.run.outcome import Line, RunOutcome, read
from hubring.workers.compare.run.runner import Runner
from hubring.workers.peers import machine
from hubring.workers.peers.processes import Lifeline, ProcessFailed
from tests.support.compare.replayed import MACHINE, QUIET, Replayed, carried_out, experiment, record

LABELS = [run.label for run in runs(experiment())]


class Interrupted(Replayed):
    """Is interrupted in its fourth run, of which only half is written."""

    def run(self, run: PlannedRun, folder: Path, progress: Callable[[Line], None]) -> RunOutcome:
        if len(self.ran) == 3:
            folder.mkdir(parents=True)
            (folder / "record 0.jsonl").write_text('{"step": 1, "sec')
            raise KeyboardInterrupt
        return Replayed.run(self, run, folder, progress)


@pytest.mark.slow
def test_resuming_with_a_changed_script_logs_a_warning(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    own = {"job": None, "script": script, "metric": "loss", "rising": False, "arguments": ("{seed}",)}
    carried_out(tmp_path / "out", Replayed(script=script), rows=("ring",), **own)
    script.touch()
    _, heard = carried_out(tmp_path / "out", Replayed(script=script), rows=("ring",), **own)
    assert heard.warnings == []
    script.write_text("# changed")
    _, heard = carried_out(tmp_path / "out", Replayed(script=script), rows=("ring",), **own)
    [warning] = heard.warnings
    assert "train.py changed after n2 k1 ring seed0, one of 2 finished runs" in warning


def test_a_link_that_cannot_be_had_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = experiment(rows=("ring",), link=LinkTable(rate=(2e8,)))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(calibrate, "calibrate", lambda tell: pytest.fail("it was calibrated"))
    with pytest.raises(UsageError, match=r"the link 200mbit is not available here: .*need root"):
        command._run(linked, tmp_path, None)


@pytest.mark.parametrize(
    ("backend", "workers", "calibrates"),
    [("gloo", (2, 4), True), ("gloo", (2,), False), ("nccl", (2, 4), False)],
)
def test_only_what_is_predicted_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, workers: tuple[int, ...], calibrates: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(Comparison, "run", lambda *given: asked.append(given[3] is not None))
    command._run(experiment(backend=backend, workers=workers), tmp_path, None)
    assert asked == [calibrates]


@pytest.mark.slow
def test_another_experiment_in_the_same_folder_is_refused_by_what_differs(tmp_path: Path) -> None:
    carried_out(tmp_path, Replayed(), rows=("ring",))
    with pytest.raises(UsageError, match=r"seeds was \[0, 1\] and is now \[0, 2\]\..*another --out"):
        carried_out(tmp_path, Replayed(), rows=("ring",), seeds=(0, 2))


def cluster(host: str) -> dict[str, Any]:
    there = {"ranks": "0, 1", "cores": 2, "processor": "an abacus", "system": "Linux"}
    return MACHINE | {"launcher": "slurm", "hosts": {host: there}}


@pytest.mark.parametrize(
    ("begun", "now", "words"),
    [
        (MACHINE, cluster("b"), "on one machine without a launcher, and this is slurm's b .ranks 0, 1;"),
        (cluster("a"), cluster("b"), r"on slurm's a .* this is slurm's b .*\. Resume there, or .* --out"),
        (
            MACHINE,
            MACHINE | {"cores": 3},
            r"machine or .*cores was 2 and is now 3\. Resume there, or .* --out",
        ),
        (MACHINE, MACHINE | {"gpus": "8 x NVIDIA H100"}, "gpus was None and is now 8 x NVIDIA H100"),
        (MACHINE, MACHINE | {"torch": "3.0"}, "with other versions: torch was None and is now 3.0"),
    ],
)
def test_a_comparison_started_on_another_machine_or_version_is_refused(
    tmp_path: Path, begun: dict[str, Any], now: dict[str, Any], words: str
) -> None:
    Comparison.begin(experiment(), tmp_path, "ps-compare run", begun)
    with pytest.raises(UsageError, match=words):
        Comparison.begin(experiment(), tmp_path, "ps-compare run", now)


def test_gpus_are_part_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_GPUS", tmp_path)
    assert machine.gpus() == {}
    for number in range(2):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t NVIDIA H100\nIRQ:   \t\t {number}\n")
    assert machine.describe()["gpus"] == "2 x NVIDIA H100"
    described = cluster("a")
    described["hosts"]["a"] |= machine.gpus()
    assert "2 cores, an abacus, 2 x NVIDIA H100, Linux" in machine.name_site(described)


@pytest.mark.slow
def test_another_name_timeout_or_tolerance_is_not_another_experiment(tmp_path: Path) -> None:
    carried_out(tmp_path, Replayed(), rows=("ring",))
    idle = Replayed()
    carried_out(tmp_path, idle, rows=("ring",), name="renamed", timeout=1e4, tolerance=1e-3)
    assert idle.ran == []


@pytest.mark.slow
def test_the_folder_can_be_copied_and_reported_elsewhere(tmp_path: Path) -> None:
    results, _ = carried_out(tmp_path / "here", Replayed(), rows=("ring",))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    (tmp_path / "there" / "results.json").unlink()
    Comparison.open(tmp_path / "there").report()
    assert json.loads((tmp_path / "there" / "results.json").read_text()) == results


def test_a_report_judges_by_another_tolerance_what_was_run(tmp_path: Path) -> None:
    apart = {f"n2 k1 hub-bsp seed0{turn}": 1.001 for turn in ("", " turn1")}
    first, _ = carried_out(tmp_path, Replayed(parameters=apart), rows=("ring", "hub-bsp"), seeds=(0,))
    assert not first["gate"]["passed"]
    again = Comparison.open(tmp_path).judged_by(0.01).report()
    assert again.gate.passed
    assert again.command == "ps-compare run --tolerance 0.01"
    assert not Comparison.open(tmp_path).report().gate.passed


def test_a_tolerance_that_allows_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--tolerance 0: expected a number above 0"):
        Comparison.begin(experiment(), tmp_path, "ps-compare run").judged_by(0)


def test_a_report_of_half_an_experiment_says_how_to_finish_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        carried_out(tmp_path, Interrupted())
    with pytest.raises(UsageError, match=f"is not finished; to resume, run: ps-compare run --out {tmp_path}"):
        Comparison.open(tmp_path).report()


@pytest.mark.parametrize(
    ("typed", "goes_on"),
    [
        ("ps-compare run", "ps-compare run --out out"),
        ("ps-compare run straggler --out straggler", "ps-compare run straggler --out out"),
        ("ps-compare run --out ./results/ --seeds 1", "ps-compare run --seeds 1 --out out"),
        ("ps-compare run --out=results 'my job.toml'", "ps-compare run 'my job.toml' --out out"),
    ],
)
def test_the_command_that_goes_on_is_the_one_typed_but_for_its_folder(typed: str, goes_on: str) -> None:
    assert resume_command(typed, Path("out")) == goes_on


def test_a_run_that_reports_too_little_is_run_again_once_its_script_is_mended(tmp_path: Path) -> None:
    mute = Replayed(records=lambda run: [line for line in record(0.01) if "test_accuracy" not in line])
    with pytest.raises(
        HubringError, match=r"rank 0 did not report 'test_accuracy'.*call hubring.report\(test_accuracy=...\)"
    ):
        carried_out(tmp_path, mute, rows=("ring",), seeds=(0,))
    mended = Replayed()
    carried_out(tmp_path, mended, rows=("ring",), seeds=(0,))
    assert mended.ran == mute.ran == ["n2 k1 ring seed0"]


@pytest.mark.slow
def test_a_damaged_outcome_is_named(tmp_path: Path) -> None:
    carried_out(tmp_path, Replayed(), rows=("local",))
    (tmp_path / "runs" / LABELS[0] / "outcome.json").write_text("{")
    with pytest.raises(HubringError, match=r"outcome.json is damaged .*; delete it to repeat the run"):
        Comparison.open(tmp_path).report()


def test_every_machine_that_is_not_at_rest_is_named(tmp_path: Path) -> None:
    _, heard = carried_out(tmp_path, Replayed(disturbed=["a", "b"]), rows=("ring",), seeds=(0,))
    assert heard.warnings[:2] == [
        f"{name} is not idle; other programs disturb the measurements" for name in ("a", "b")
    ]


def test_a_run_s_folder_that_others_still_write_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_to(*_: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(shutil, "rmtree", written_to)
    run = runs(experiment())[0]
    with pytest.raises(
        HubringError, match=r"cannot be emptied \(.*not empty\)\. .* wait until they have ended"
    ):
        Runner(experiment()).run(run, tmp_path, lambda line: None)


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    Comparison.begin(experiment(), tmp_path, "ps-compare run")
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another ps-compare is running in"):
            # Rewrites the experiment's file, on which a lock would be lost.
            carried_out(tmp_path, Replayed(), timeout=99.0)


@pytest.mark.slow
def test_a_disturbed_run_is_named_at_once_and_in_the_verdict(tmp_path: Path) -> None:
    results, heard = carried_out(
        tmp_path, Replayed(noise=RunNoise((0.0, 0.0), 0.4, cores=(1.0, 0.8))), rows=("local",)
    )
    assert f"{LABELS[0]}: other programs used 0.8 cores and the run 1.0" in heard.warnings
    assert not results["noise"]["quiet"]
    assert any("runs were disturbed: in n2 k1 local seed0" in sentence for sentence in results["verdict"])


def test_a_few_disturbed_runs_are_run_again_once(tmp_path: Path) -> None:
    robbed, trainer = RunNoise((0.0, 0.0), 0.0, stolen=0.5), Replayed()
    trainer.noises = lambda run: [robbed if trainer.ran == LABELS[:2] else QUIET]
    for _ in range(2):
        results, heard = carried_out(tmp_path, trainer)
        assert results["noise"]["quiet"]
        assert results["noise"]["repeated"] == 1
    assert trainer.ran == [*LABELS, LABELS[1]]
    assert heard.repeated_runs == []


class FailsWhenRepeated(Replayed):
    error: BaseException

    def run(self, run: PlannedRun, folder: Path, progress: Callable[[Line], None]) -> RunOutcome:
        if run.label in self.ran:
            folder.mkdir()
            raise self.error
        return Replayed.run(self, run, folder, progress)


@pytest.mark.parametrize("seeds", [(0, 1), (0,)])
@pytest.mark.parametrize("error", [ProcessFailed("worker 0 exited with 1"), KeyboardInterrupt()], ids=repr)
def test_a_disturbed_run_counts_if_its_repeat_fails(
    tmp_path: Path, error: BaseException, seeds: tuple[int, ...]
) -> None:
    robbed, trainer = RunNoise((0.0, 0.0), 0.0, stolen=0.5), FailsWhenRepeated()
    trainer.error = error
    trainer.noises = lambda run: [robbed if len(trainer.ran) == 2 else QUIET]
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            carried_out(tmp_path, trainer, seeds=seeds)
        results = Comparison.open(tmp_path).report()
        assert results.noise.repeated == 0
        return
    found, heard = carried_out(tmp_path, trainer, seeds=seeds)
    assert any("worker 0 exited with 1" in warning for warning in heard.warnings)
    assert found["noise"]["repeated"] == 0
    assert [row["failed"] for row in found["rows"]] == [None] * len(found["rows"])


def test_the_lifeline_kills_what_it_holds_though_nothing_is_installed_and_the_environment_is_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    sleep = partial(subprocess.Popen, ["sleep", "600"], start_new_session=True)
    with sleep() as held, sleep() as released:
        with Lifeline() as line:
            for each in (held, released):
                line.hold(each.pid)
            line.release(released.pid)
        assert held.wait(60) == -9
        assert released.poll() is None
        released.kill()


def test_an_outcome_of_before_runs_were_repeated_is_read(tmp_path: Path) -> None:
    run = runs(experiment())[0]
    Replayed().run(run, tmp_path, lambda line: None)
    file = tmp_path / "outcome.json"
    older = json.loads(file.read_text())
    del older["instead_of"]
    file.write_text(json.dumps(older))
    assert read(tmp_path, run).instead_of == ""
