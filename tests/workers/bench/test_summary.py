"""The tables in RESULTS.md are what the committed measurement renders to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.workers.bench import cli
from hubring.workers.bench.case import Case
from hubring.workers.bench.report.ratios import table, targets
from hubring.workers.bench.report.summary import BEGIN, END, GPU_NOTE, put_into, read, render

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "workers" / "bench" / "measured.json"
RESULTS = ROOT / "workers" / "bench" / "RESULTS.md"


def made(row: str, n: int, median_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "row": row,
        "n": n,
        "shape": "flat",
        "optimizer": "sgd",
        "bytes": 100 << 20,
        "median_ms": median_ms,
        "spread_ms": median_ms / 10,
        "steps": 15,
        "wrong": 0,
        "shards": 2,
        "samples_per_s": 0.0,
        "exposed_ms": 0.0,
        "machine": "2 cores",
        "date": "2026-01-01",
        **more,
    }


def cells(text: str, row: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| `{row}`"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_results_are_those_of_the_committed_measurement() -> None:
    assert f"{BEGIN}\n{render(read(MEASURED))}\n{END}" in RESULTS.read_text()


def test_the_committed_measurement_has_nothing_wrong() -> None:
    assert [each["row"] for each in read(MEASURED) if each["wrong"]] == []


def test_nothing_is_wanted_of_another_size() -> None:
    rows = [made("gloo+sgd", 2, 10.0), made("hub-shm", 2, 5.0)]
    assert table(rows)
    assert not table([{**row, "bytes": 8 << 20} for row in rows])


def test_ratios_are_to_the_peer_and_to_the_limit_of_the_kind() -> None:
    rows = {"gloo+sgd": 100.0, "hub-shm": 25.0, "hub-zmq": 90.0, "raw-tcp": 75.0}
    bounds = {"bound-memory": 30.0, "bound-memory-2": 20.0}
    text = render([made(row, 2, median) for row, median in (rows | bounds).items()])
    assert cells(text, "hub-shm") == ["25 (2.5)", "4.0", "1.25"]
    assert cells(text, "hub-zmq") == ["90 (9)", "1.1", "1.20"]


def test_a_row_on_a_gpu_is_held_against_the_limit_there() -> None:
    on_cpu = [made("hub-shm", 2, 25.0), made("bound-memory", 2, 20.0)]
    text = render([*on_cpu, made("hub-cuda", 2, 3.0), made("bound-cuda", 2, 2.0)])
    assert cells(text, "hub-cuda") == ["3 (0.3)", "-", "1.50"]
    assert GPU_NOTE in text
    assert GPU_NOTE not in render(on_cpu)


def test_what_was_not_measured_is_left_empty_and_one_worker_has_no_peer() -> None:
    text = render([made("gloo+sgd", 1, 10.0), made("hub-shm", 1, 0.123), made("gloo+sgd", 2, 100.0)])
    assert cells(text, "hub-shm") == ["0.123 (0.0123)", "-", "-", "-", "-", "-"]


def test_whole_training_steps_tell_speed_and_exposed_exchange() -> None:
    rows = [("ddp-gloo", 200.0, 160, 100.0), ("hub-shm", 125.0, 256, 25.0)]
    text = render(
        [
            made(row, 2, median, shape="mlp", samples_per_s=speed, exposed_ms=exposed)
            for row, median, speed, exposed in rows
        ]
    )
    assert cells(text, "hub-shm") == ["125 (12.5)", "256", "25", "1.60"]


def test_what_is_wanted_is_shown_as_measured_and_not_as_reached_where_it_is_not() -> None:
    rows = {"gloo+sgd": 100.0, "hub-shm": 25.0, "hub-zmq": 90.0, "raw-tcp": 75.0, "bound-memory-2": 20.0}
    text = render([made(row, 2, median) for row, median in rows.items()])
    assert "| 2 workers, flat, sgd | `gloo+sgd` / `hub-shm` | ≥ 5 | 4.000 | no |" in text
    assert "| 2 workers, flat, sgd | `hub-shm` / limit of memory | ≤ 1.5 | 1.250 | yes |" in text
    assert "| 2 workers, flat, sgd | `hub-zmq` / `raw-tcp` | ≤ 1.25 | 1.200 | yes |" in text
    assert "`mpi` / `hub-shm`" not in text


def test_latency_and_the_cost_of_many_tensors_are_among_what_is_wanted() -> None:
    entries = [made("hub-shm", 1, 0.467, shape="lone")]
    entries += [
        made("hub-zmq", 2, ms, shape=shape) for shape, ms in (("thousand", 110.0), ("thousand-flat", 100.0))
    ]
    text = table(entries)
    assert "| 1 worker, lone, sgd | `hub-shm`, ms | ≤ 0.25 | 0.467 | no |" in text
    assert "| 2 workers, thousand, sgd | `hub-zmq`: thousand / thousand-flat | ≤ 1.15 | 1.100 | yes |" in text


def test_all_that_is_wanted_is_measured_by_the_standard_cases() -> None:
    cases = set(cli.cases_of(None))
    standard = [target for target in targets() if Case(*target.over.case) in cases]
    assert all(target.under is None or Case(*target.under.case) in cases for target in standard)
    for row in ("mpi", "hub-colo", "hub-grpc", "ddp-gloo"):
        assert any(target.over.row == row for target in standard)
    assert {target.over.case[0] for target in standard if target.over.row == "hub-zmq"} == {1, 2, 4}


def test_the_commit_is_told_where_it_is_known() -> None:
    assert "2026-01-01; commit abc1234." in render([made("hub-shm", 2, 1.0, commit="abc1234")])
    assert "commit" not in render([made("hub-shm", 2, 1.0)])


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
        read(file)
