"""The tables in RESULTS.md are what the committed measurement renders to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.workers.bench import cli
from hubring.workers.bench.case import BenchEntry
from hubring.workers.bench.summary import BEGIN, END, GPU_NOTE, put_into, read_entries, render, targets

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "workers" / "bench" / "measured.json"
RESULTS = ROOT / "workers" / "bench" / "RESULTS.md"


def made(row: str, n: int, median_ms: float, **more: Any) -> BenchEntry:
    case = {"row": row, "n": n, "shape": "flat", "optimizer": "sgd", "bytes": 100 << 20}
    times = {"median_ms": median_ms, "min_ms": median_ms, "spread_ms": median_ms / 10}
    rest = {"steps": 15, "wrong": 0, "algbw": 1.0, "busbw": 1.0}
    return BenchEntry(**{**case, **times, **rest, **more})


def cells(text: str, row: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| `{row}`"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_results_are_those_of_the_committed_measurement() -> None:
    assert f"{BEGIN}\n{render(read_entries(MEASURED))}\n{END}" in RESULTS.read_text()


def test_the_committed_measurement_has_nothing_wrong() -> None:
    assert [each.row for each in read_entries(MEASURED) if each.wrong] == []


def test_a_row_is_held_against_the_limit_of_its_device_and_wire() -> None:
    on_cpu = [made("hub-shm", 2, 25.0), made("bound-memory", 2, 20.0)]
    encrypted = render([*on_cpu, made("hub-zmq-aes", 2, 6.0), made("raw-tcp-aes", 2, 5.0)])
    assert cells(encrypted, "hub-zmq-aes") == ["6 (0.6)", "1.20"]
    text = render([*on_cpu, made("hub-cuda", 2, 3.0), made("bound-cuda", 2, 2.0)])
    assert cells(text, "hub-cuda") == ["3 (0.3)", "1.50"]
    assert GPU_NOTE in text
    assert GPU_NOTE not in render(on_cpu)


def test_unmeasured_cells_are_empty_and_unmeasured_columns_are_left_out() -> None:
    text = render([made("gloo+sgd", 1, 10.0), made("hub-shm", 1, 0.123), made("gloo+sgd", 2, 100.0)])
    assert "| flat, sgd | 1 worker | 2 workers | peer |\n" in text
    assert cells(text, "hub-shm") == ["0.123 (0.0123)", "-", "-"]


def test_targets_are_shown_with_the_measured_value_and_whether_it_is_met() -> None:
    rows = {"gloo+sgd": 100.0, "hub-shm": 25.0, "hub-zmq-tcp": 90.0, "raw-tcp": 75.0, "bound-memory-2": 20.0}
    adam = [
        made(row, 2, median, optimizer="adam") for row, median in (("gloo+sgd", 150.0), ("hub-shm", 25.0))
    ]
    text = render([*(made(row, 2, median) for row, median in rows.items()), *adam])
    assert "| `gloo+sgd` / `hub-shm` | ≥ 5 | 4.000 **missed** (2:flat:sgd), 6.000 (2:flat:adam) |" in text
    assert "| `hub-shm` / limit of memory | ≤ 1.5 | 1.250 (2:flat:sgd) |" in text
    assert "| `hub-zmq-tcp` / `raw-tcp` | ≤ 1.25 | 1.200 (2:flat:sgd) |" in text
    assert "`mpi` / `hub-shm`" not in text


def test_all_that_is_wanted_is_measured_by_the_standard_cases() -> None:
    cases = set(cli.cases_of(None))
    standard = [target for target in targets() if target.case in cases]
    assert all(not target.under or target.under_case in cases for target in standard)
    for row in ("mpi", "hub-colo", "hub-grpc", "ddp-gloo"):
        assert any(target.over == row for target in standard)
    assert {target.case.n for target in standard if target.over == "hub-zmq-tcp"} == {1, 2, 4}


def test_wrong_elements_are_not_kept_quiet() -> None:
    assert "3 ELEMENTS WRONG" in render([made("hub-shm", 2, 1.0, wrong=3)])


def test_tables_replace_what_stood_between_the_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(readme, "new")
    assert readme.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    readme.write_text("no place")
    with pytest.raises(ConfigError, match=r"README\.md has no place"):
        put_into(readme, "new")


@pytest.mark.parametrize("content", ["", "[]", json.dumps([{"row": "x"}])])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="is not a result file of ps-worker bench"):
        read_entries(file)
