"""`make gpu` without a GPU: what is run of it, and what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as program
from tests.gpu import bench, comparison, pytests, training
from tests.gpu.pytests import verdict
from tests.gpu.row import Row, exit_code, table
from tests.support.processes.cluster import SMALL, Cluster


def test_without_a_device_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main() == 69
    assert capsys.readouterr() == ("", "make gpu: torch finds no CUDA device here; nothing was run\n")


def test_a_table_has_a_line_for_every_part_and_fails_with_any_of_them() -> None:
    rows = [Row("hub", "passed", "3 ms"), Row("ring over NCCL", "left out", "")]
    assert table(rows).splitlines() == [
        "part            outcome   measured",
        "hub             passed    3 ms",
        "ring over NCCL  left out",
    ]
    assert exit_code(rows) == 0
    assert exit_code([*rows, Row("bench", "failed", "")]) == 1


@pytest.mark.parametrize(
    ("code", "summary", "outcome"),
    [
        (0, "26 passed, 7000 deselected in 41.03s", "passed"),
        (1, "1 failed, 25 passed, 7000 deselected in 41.03s", "failed"),
        (0, "1 passed, 25 skipped, 7000 deselected in 2.00s", "failed"),
        (5, "7000 deselected in 2.00s", "failed"),
    ],
)
def test_tests_that_fail_are_skipped_or_are_not_there_fail_the_part(
    code: int, summary: str, outcome: str
) -> None:
    assert verdict("tests", code, summary) == Row("tests", outcome, summary)  # type: ignore[arg-type]


def test_one_part_that_fails_keeps_no_other_from_running_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def breaks(*_: object) -> Row:
        raise RuntimeError("no memory\nis left")

    for part in (pytests, comparison, bench):
        monkeypatch.setattr(part, "run", breaks)
    for name in ("hub", "ring", "heals"):
        monkeypatch.setattr(training, name, breaks)
    rows = program.run(tmp_path)
    trainings = ["hub on the GPU", "ring over NCCL", "ring that heals"]
    tests, others = ["tests marked gpu", "scripts on the GPU"], ["comparison", "bench"]
    assert [row.part for row in rows] == [*tests, *trainings, *others]
    assert {(row.outcome, row.measured) for row in rows} == {("failed", "no memory")}
    assert "is left" in capsys.readouterr().err


def test_the_files_that_the_parts_run_exist() -> None:
    assert all(Path(path).exists() for path in (training.SCRIPT, *pytests.FILES))


def test_a_row_of_the_bench_that_came_out_wrong_has_failed() -> None:
    entry = {"row": "nccl", "n": 2, "shape": "flat", "optimizer": "sgd", "median_ms": 1.5, "busbw": 20.0}
    assert bench.entries([{**entry, "wrong": 0}, {**entry, "wrong": 3}]) == [
        Row("bench nccl, 2:flat:sgd", "passed", "1.50 ms, 20.00 GB/s, 0 wrong"),
        Row("bench nccl, 2:flat:sgd", "failed", "1.50 ms, 20.00 GB/s, 3 wrong"),
    ]


def test_the_rows_of_a_comparison_pass_with_its_gate() -> None:
    speeds = {"withheld": None, "failed": None, "numbers": {"step_ms": {"median": 2.5}}}
    rows = [{"row": "ring", **speeds}, {"row": "ddp", **speeds, "failed": "1 of 1: exited with 1"}]
    passing = Row("comparison, ring", "passed", "2.50 ms a step, gate passed")
    failing = Row("comparison, ring", "failed", "2.50 ms a step, gate failed")
    broken = Row("comparison, ddp", "failed", "1 of 1: exited with 1")
    for passed, ring in ((True, passing), (False, failing)):
        assert comparison.entries({"gate": {"passed": passed}, "rows": rows}) == [ring, broken]


@pytest.mark.full
@pytest.mark.slow
def test_two_tasks_compare(cluster: Cluster) -> None:
    rows = comparison.run(cluster, gpus=2, environment={}, backend="gloo", rows=("ring", "hub-bsp"))
    assert [(row.part, row.outcome) for row in rows] == [
        ("comparison, ring", "passed"),
        ("comparison, hub-bsp", "passed"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--topology", "ring"]], ids=["hub", "ring"])
def test_a_training_is_measured(cluster: Cluster, flags: list[str]) -> None:
    told = [{"PS_TIMEOUT": "60"}, {}]
    results = training.train(cluster, "small", [SMALL, "20"], worker=flags, told=told)
    assert [result["rank"] for result in results] == [0, 1]
    row = training.measured("small", results)
    assert (row.part, row.outcome) == ("small", "passed")
    assert row.measured.startswith("20 steps, ")
    assert row.measured.endswith(" bytes sent a step and rank")


@pytest.mark.slow
def test_a_ring_that_loses_a_worker_ends_in_the_parameters_of_those_that_were_there(cluster: Cluster) -> None:
    row = training.heals(cluster, gpus=0, environment={}, backend="gloo")
    assert (row.part, row.outcome) == ("ring that heals", "passed")
    assert " a pause of " in row.measured
