"""The report shows the conditions of all steps, and counts what should have been recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.workers.compare.findings import decode
from hubring.workers.compare.show.page import page
from tests.support.compare.replayed import Replayed, carried_out, findings, record
from tests.workers.compare.plants.equal_conditions import CLEAN, PLANTS, STEPS


def test_the_report_lists_the_conditions_of_all_steps(tmp_path: Path) -> None:
    threads = {"local": "1", "ring": "1", "hub-bsp": "1", "hub-asp": "2"}
    known = {name: {"conditions": CLEAN | {"threads": each}} for name, each in threads.items()}
    results, _ = carried_out(tmp_path, Replayed(results=known))
    assert results["conditions"]["threads"] == "1, 2"
    assert "In all steps, workers had: threads: 1, 2; cores: 2;" in (tmp_path / "report.html").read_text()


def test_results_of_an_earlier_version_say_that_conditions_were_not_recorded(tmp_path: Path) -> None:
    results, _ = carried_out(tmp_path, Replayed())
    assert results["conditions"] == {}
    text = (tmp_path / "results.json").read_bytes().replace(b'"conditions"', b'"unknown"')
    assert "Conditions were not recorded." in page(decode(text))


def test_steps_that_late_workers_leave_out_are_not_missing(tmp_path: Path) -> None:
    known = Replayed(
        records=lambda run: record(0.01, 70 if run.row.backup else 100),
        results={"hub-backup": {"steps": 100}},
    )
    assert not any(row.failed for row in findings(tmp_path, known, rows=("local", "ring", "hub-backup")).rows)


@pytest.mark.slow
def test_steps_without_a_record_count_as_not_judged(tmp_path: Path) -> None:
    gate = PLANTS["a row that the gate could not judge"].findings(tmp_path).gate
    assert not gate.passed
    assert (gate.judged, gate.taken) == (3 * STEPS, 4 * STEPS)
