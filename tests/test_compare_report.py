"""The page needs nothing else, and says what the results say; the runner leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from plotly.offline import get_plotlyjs
from safetensors.torch import save_file

from ps.errors import DeadlineExceeded
from tests.test_compare_table import DIGITS, outcome, record
from workers.compare.comparison import Comparison
from workers.compare.measure import Measure
from workers.compare.outcome import Line, Outcome, latest
from workers.compare.process import Processes, ProcessFailed
from workers.compare.report import page
from workers.compare.row import ROWS, Row
from workers.compare.runner import Runner

LOUD = "import sys; print('the cause', file=sys.stderr); sys.exit(3)"
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("deaf", flush=True)
time.sleep(600)
"""
RUNNER = Runner(
    job="digits",
    job_arguments=("--seed", "0"),
    workers=2,
    shards=1,
    transport="auto",
    threads=1,
    timeout=60.0,
    directory=Path(),
)


class Replayed:
    """Runs nothing: every row left the same records, and parameters that the test chose."""

    def __init__(self, directory: Path, parameters: dict[str, float]) -> None:
        self.directory, self._parameters = directory, parameters
        self.workers, self.shards, self.transport, self.threads = 2, 1, "auto", 1

    def run(self, row: Row, label: str, progress: Any) -> Outcome:
        file = self.directory / f"{label}.safetensors"
        save_file({"w": torch.full((3,), self._parameters.get(label, 1.0))}, file)
        progress({"step": 1})
        return replace(outcome(*[record(0.01)] * row.workers(2)), parameters=file)


def compared(directory: Path, **parameters: float) -> tuple[list[Measure], dict[str, Any]]:
    rows = [ROWS[name] for name in ("local", "ring", "hub-bsp", "hub-asp")]
    chosen = {name.replace("_", "-"): value for name, value in parameters.items()}
    runner: Any = Replayed(directory, chosen)
    comparison = Comparison(DIGITS, rows, runner, 0, None, 0.93, 1e-4, "ps-compare run --rows '<all>'")
    return comparison.run(lambda run, line: None, lambda run: None)


class Links(HTMLParser):
    """Collects whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("comparison")
    _, written = compared(directory)
    return directory, written


def test_the_page_fetches_nothing_and_closes_every_element(results: tuple[Path, dict[str, Any]]) -> None:
    html = (results[0] / "report.html").read_text()
    links = Links()
    links.feed(html)
    assert links.found == []
    assert links.open == []
    assert "@import" not in html.replace(get_plotlyjs(), "")
    assert html.count(get_plotlyjs()) == 1


def test_the_page_leads_with_the_verdict_then_gate_then_numbers(results: tuple[Path, dict[str, Any]]) -> None:
    html = (results[0] / "report.html").read_text().replace(get_plotlyjs(), "")
    places = [html.index(f"<li>{results[1]['verdict'][0]}"), html.index(">Yes.<"), html.index("<th>images/s")]
    assert places == sorted(places)
    assert "ps-compare run --rows &#x27;&lt;all&gt;&#x27;" in html


def test_the_page_carries_the_curves_as_data_that_cannot_end_the_script(
    results: tuple[Path, dict[str, Any]],
) -> None:
    html = (results[0] / "report.html").read_text()
    found = re.search(r"^const results = (.*);$", html, re.MULTILINE)
    assert found is not None
    assert "<" not in found[1]
    assert json.loads(found[1]) == results[1]


def test_results_on_disk_are_those_returned(results: tuple[Path, dict[str, Any]]) -> None:
    assert json.loads((results[0] / "results.json").read_text()) == results[1]
    assert [row["row"] for row in results[1]["rows"]] == ["local", "ring", "hub-bsp", "hub-asp"]
    assert results[1]["gate"]["passed"]
    assert len(results[1]["curves"]["ring"]["loss"]) == 100


def test_a_row_that_disagrees_is_shown_without_speed_or_curve(tmp_path: Path) -> None:
    measures, results = compared(tmp_path, ring=1.5)
    assert [measure.row for measure in measures if measure.withheld] == ["ring"]
    assert results["curves"]["ring"] == {}
    assert not results["gate"]["passed"]
    html = page(results, measures, DIGITS).replace(get_plotlyjs(), "")
    assert ">No.<" in html
    assert "<li>No speed is shown for ring: ring differs from local by 0.5 in w" in html


def test_a_hub_that_does_not_repeat_itself_is_shown_without_speed(tmp_path: Path) -> None:
    measures, _ = compared(tmp_path, **{"hub-bsp again": 1.0 + 2**-20})
    assert [measure.row for measure in measures if measure.withheld] == ["hub-bsp"]


def test_a_parameter_that_is_not_a_number_is_still_valid_json(tmp_path: Path) -> None:
    _, results = compared(tmp_path, ring=float("nan"))
    assert results["gate"]["pairs"][0]["difference"] == "nan"
    assert "differs from local by nan" in json.loads((tmp_path / "results.json").read_text())["verdict"][0]


def test_the_asynchronous_row_passes_no_gate_and_needs_none(tmp_path: Path) -> None:
    measures, results = compared(tmp_path, **{"hub-asp": 7.0})
    assert results["gate"]["passed"]
    assert not any(measure.withheld for measure in measures)


def test_the_latest_report_is_the_last_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "record"
    assert latest(file) is None
    file.write_text('{"step": 1}')
    assert latest(file) is None
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert latest(file) == {"step": 2}


def run_to_the_end(processes: Processes) -> None:
    with processes:
        for name, code in (("patient", "import time; time.sleep(600)"), ("loud", LOUD)):
            processes.start(name, [sys.executable, "-c", code])
        while processes.running():
            processes.pause("the end")


def test_a_failed_child_is_shown_by_the_end_of_its_log_and_the_others_end(tmp_path: Path) -> None:
    processes = Processes(tmp_path, dict(os.environ), timeout=60)
    with pytest.raises(ProcessFailed, match=r"(?s)loud ended with exit code 3.*the cause"):
        run_to_the_end(processes)
    assert [process.code for process in processes.started] == [-signal.SIGTERM, 3]


def test_children_that_take_too_long_are_named_and_end(tmp_path: Path) -> None:
    processes = Processes(tmp_path, dict(os.environ), timeout=0)
    with pytest.raises(DeadlineExceeded, match=r"(?s)the end did not come within 0 s.*patient still runs"):
        run_to_the_end(processes)
    assert None not in [process.code for process in processes.started]


@pytest.mark.slow
def test_a_child_that_will_not_stop_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.compare.process.GRACE_SECONDS", 0.0)
    with Processes(tmp_path, dict(os.environ), timeout=60) as processes:
        stubborn = processes.start("stubborn", [sys.executable, "-c", STUBBORN])
        while "deaf" not in stubborn.out.read_text():
            processes.pause("its first word")
    assert stubborn.code == -signal.SIGKILL


def test_a_result_that_is_no_json_object_is_an_error_with_the_log(tmp_path: Path) -> None:
    with Processes(tmp_path, dict(os.environ), timeout=60) as processes:
        child = processes.start("child", [sys.executable, "-c", "print('done')"])
        child.end(60)
    with pytest.raises(ProcessFailed, match="child ended without a JSON object"):
        child.result()


@pytest.mark.slow
def test_a_row_on_the_hub_and_one_alone_end_in_the_same_parameters(tmp_path: Path) -> None:
    runner = replace(RUNNER, job_arguments=("--epochs", "1", "--seed", "3"), directory=tmp_path)
    rows = [ROWS[name] for name in ("local", "hub-bsp")]
    seen: list[tuple[str, Line]] = []
    comparison = Comparison(DIGITS, rows, runner, 3, 1, 0.1, 1e-4, "ps-compare run")
    measures, results = comparison.run(lambda run, line: seen.append((run, line)), lambda run: None)
    assert results["gate"]["passed"], results["gate"]
    assert [measure.steps for measure in measures] == [22, 22]
    assert {run for run, _ in seen} == {"local", "hub-bsp", "hub-bsp again"}
    assert "--mode bsp" in results["commands"]["hub-bsp"][0]


def test_the_program_imports_torch_only_once_it_is_needed() -> None:
    code = "import sys, workers.compare.cli; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_a_row_that_does_not_exist_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "workers.compare.cli", "run", "--rows", "local,rng"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "there is no row 'rng'; there are local, ring" in json.loads(ended.stdout)["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_comparison_that_is_stopped_ends_its_children(tmp_path: Path, number: int, code: int) -> None:
    command = ["run", "--rows", "hub-bsp", "--epochs", "1000", "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "workers.compare.cli", *command], stdout=subprocess.PIPE, text=True
    ) as program:
        record = tmp_path / "hub-bsp" / "record 0.jsonl"
        while latest(record) is None:
            assert program.poll() is None
            time.sleep(0.05)
        program.send_signal(number)
        said, _ = program.communicate(timeout=60)
    assert program.returncode == code
    assert json.loads(said.splitlines()[-1])["exit_code"] == code
    # that no child is left is seen to by the fixture no_process_outlives_its_test
