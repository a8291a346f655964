"""What is written beside the results says what they say; programs that were started leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hubring.ps.config import terminal
from hubring.ps.core.errors import DeadlineExceeded
from hubring.workers.compare import cli
from hubring.workers.compare.comparison import Comparison
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import Line, RunOutcome, latest, read_record
from hubring.workers.peers.processes import Lifeline, LocalProcess, ProcessFailed, RunProcesses
from tests.support.compare.replayed import Replayed, carried_out, experiment
from tests.support.pages.html_tree import html_tree

LOUD = "import sys; print('the cause', file=sys.stderr); sys.exit(3)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    carried_out(folder, Replayed())
    return folder


class Edited(Replayed):
    """Changes the script after every run."""

    def run(self, run: PlannedRun, folder: Path, progress: Callable[[Line], None]) -> RunOutcome:
        left = Replayed.run(self, run, folder, progress)
        assert self.script is not None
        self.script.write_text(f"# {run.label}")
        return left


def test_versions_of_the_script_are_told_on_the_page_and_in_every_later_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    own = {"job": None, "script": script, "metric": "loss", "rising": False, "arguments": ("{seed}",)}
    results, _ = carried_out(tmp_path / "out", Edited(script=script), rows=("ring",), **own)
    said = (
        "train.py changed between runs: n2 k1 ring seed0 and n2 k1 ring seed1 ran different versions of it."
        " To run one version everywhere, use another --out."
    )
    assert said in results["verdict"]
    assert said in html_tree((tmp_path / "out" / "report.html").read_text()).text
    assert said in Comparison.open(tmp_path / "out").report().verdict


def test_mlperfs_lines_tell_every_run_from_start_to_stop(folder: Path) -> None:
    lines = (folder / "mllog.txt").read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert all(
        event.keys() == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for event in events
    )
    ring = [event for event in events if event["metadata"]["label"] == "n2 k1 ring seed1"]
    assert [event["time_ms"] for event in ring] == sorted(event["time_ms"] for event in ring)
    keys = [event["key"] for event in ring]
    assert (keys.index("run_start"), keys[-1]) == (3, "run_stop")
    assert ring[1]["value"] == 1
    assert ring[-1]["metadata"]["status"] == "success"
    assert [event["value"] for event in ring if event["key"] == "eval_accuracy"][-1] == 1.0


def test_tensorboard_gets_every_run_with_its_scalars(folder: Path) -> None:
    files = list((folder / "tensorboard").glob("*/events.out.tfevents.*"))
    assert {file.parent.name for file in files} == {
        entry.name for entry in (folder / "runs").iterdir() if entry.is_dir()
    }
    assert all(name in files[0].read_bytes() for name in (b"loss", b"test_loss", b"test_accuracy"))


def test_the_latest_report_is_the_last_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "record"
    assert (latest(file), read_record(file)) == (None, [])
    file.write_text('{"step": 1}')
    assert latest(file) is None
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert latest(file) == {"step": 2}
    assert read_record(file) == [{"step": 1}, {"step": 2}]


def run_to_the_end(processes: RunProcesses, *, expendable: bool = False) -> None:
    with processes:
        for name, code in (("patient", "import time; time.sleep(600)"), ("loud", LOUD)):
            processes.start(name, [sys.executable, "-c", code]).expendable = expendable
        while processes.running():
            processes.pause("the end")


def test_a_failed_child_is_shown_by_the_end_of_its_log_and_the_others_end(tmp_path: Path) -> None:
    processes = RunProcesses(tmp_path, dict(os.environ), timeout=60)
    with pytest.raises(ProcessFailed, match=r"(?s)loud exited with 3.*the cause"):
        run_to_the_end(processes)
    assert [process.code for process in processes.started] == [-signal.SIGTERM, 3]


def test_a_child_that_was_killed_is_named_before_those_that_lost_it(tmp_path: Path) -> None:
    with RunProcesses(tmp_path, dict(os.environ), timeout=60) as processes:
        for name, code in (("bereft", "exit(69)"), ("killed", "import os; os.kill(os.getpid(), 9)")):
            processes.start(name, [sys.executable, "-c", code]).end(30)
        with pytest.raises(ProcessFailed, match=r"killed was killed by signal 9 \(SIGKILL\)"):
            processes.running()


def test_children_that_take_too_long_are_named_and_end(tmp_path: Path) -> None:
    processes = RunProcesses(tmp_path, dict(os.environ), timeout=0)
    with pytest.raises(DeadlineExceeded, match=r"(?s)waited 0 s .* for the end.*patient is still running"):
        run_to_the_end(processes, expendable=True)
    assert None not in [process.code for process in processes.started]


def test_a_result_that_is_no_json_object_is_an_error_with_the_log(tmp_path: Path) -> None:
    with RunProcesses(tmp_path, dict(os.environ), timeout=60) as processes:
        child = processes.start("child", [sys.executable, "-c", "print('done')"])
        child.end(60)
    with pytest.raises(ProcessFailed, match="child ended without a JSON object"):
        child.result()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--rows", "local,rng"], "no row 'rng'; expected one of local, ring"),
        (["run", "digts"], "no file and no built-in experiment digts; did you mean digits?"),
        (["report", "nowhere"], "nowhere has no experiment.json"),
    ],
)
def test_a_path_that_does_not_exist_is_a_usage_error(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        terminal.run(cli.app, "ps-compare", words)
    assert ended.value.code == 2
    assert said in json.loads(capsys.readouterr().out)["error"]
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_rows_jobs_experiments_and_results(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "done")
    Comparison.begin(experiment(), tmp_path / "mine", "ps-compare run mine.toml --out results/mine")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "experiment.json").write_text("{}")
    with pytest.raises(SystemExit):
        cli.show_list(tmp_path)
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert {"ring", "hub-asp"} < set(found["rows"])
    assert "digits" in found["jobs"]
    assert "digits" in found["experiments"]
    assert found["results"] == ["done", "mine", "odd"]
    assert "finished, 10 runs" in said.err
    resume = f"to resume, run: ps-compare run mine.toml --out {tmp_path / 'mine'}\n"
    assert f"not finished, 0 runs so far; {resume}" in said.err
    assert "experiment.json is damaged ('command')" in said.err


class Heard(Lifeline):
    """Notes its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def hold(self, pid: int) -> None:
        self.told.append(("hold", pid))

    def release(self, pid: int) -> None:
        self.told.append(("release", pid))


class Stubborn(LocalProcess):
    """Once it has ended, an error tells so."""

    def end(self, timeout: float) -> None:
        super().end(timeout)
        raise InterruptedError


def test_a_process_is_off_the_lifeline_at_its_end_whatever_becomes_of_the_next(tmp_path: Path) -> None:
    heard, own = Heard(), dict(os.environ)
    processes = RunProcesses(tmp_path, own, 60, heard)
    first = processes.start("first", ("sleep", "600"))
    second = processes.add(Stubborn("second", ("sleep", "600"), tmp_path, own))
    with pytest.raises(InterruptedError):
        processes.end()
    assert heard.told == [("hold", first.pid), ("hold", second.pid), ("release", first.pid)]
