"""Predictions are scored beside what was measured, each once, and not where they were calibrated."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hubring.workers.compare.findings import Accuracy
from hubring.workers.compare.plan.setting import Fault, Link, Setting
from hubring.workers.compare.predict.prediction import predict
from hubring.workers.compare.predict.score import Score, model_bytes, points
from tests.support.compare.calibration import (
    CONSTANTS,
    LINKED,
    THEIRS,
    entry,
    experiment,
    findings,
    listed,
    rounded,
    score,
)


def test_the_model_size_is_what_a_worker_sends() -> None:
    found = experiment()
    assert model_bytes(found.settings, found.rows) == 40 << 20
    assert model_bytes(found.settings, [row for row in found.rows if row.row != "ring"]) == 40 << 20
    assert model_bytes(found.settings, []) is None


def test_only_what_was_not_calibrated_on_counts() -> None:
    model = score(experiment())
    predictions = model.predictions()
    calibrated = [each for each in predictions if each.calibrated]
    assert {(each.row, each.setting) for each in calibrated} == {
        ("ring", "n4 k1 1000mbit"),
        ("hub-bsp", "n4 k1 1000mbit"),
    }
    assert rounded(model.accuracy(predictions)) == Accuracy(0.0, 6)


def test_a_run_that_counts_in_many_settings_is_scored_once() -> None:
    predictions = score(listed(experiment())).predictions()
    rings = [each.setting for each in predictions if each.row == "ring"]
    assert rings == ["n4 k1 1000mbit", "n4 k1 200mbit"]


def test_the_score_reports_a_wrong_prediction() -> None:
    predictions = score(experiment(wrong=1.25)).predictions()
    accuracy = Score.accuracy(predictions)
    assert accuracy is not None
    assert accuracy.mean_error == pytest.approx(0.2)
    assert {round(each.error or 0.0, 6) for each in predictions if not each.calibrated} == {-0.2}


def test_scaling_has_what_was_measured_and_what_lies_beyond() -> None:
    ring = next(each for each in score(experiment()).scaling() if each.row == "ring")
    assert ring.workers == [1, 2, 4, 8, 16]
    assert [speed is not None for speed in ring.measured] == [False, False, True, False, False]
    assert ring.predicted[2] == pytest.approx(ring.measured[2])


def test_withheld_and_unknown_rows_are_left_out() -> None:
    found = experiment()
    first, second, third, *others = found.rows
    rows = [
        replace(first, withheld="wrong"),
        replace(second, row="gossip"),
        replace(third, numbers={**third.numbers, "step_ms": None}),
    ]
    assert len(points(found.settings, [*rows, *others])) == 5


SERVERS = [Setting(workers=4, servers=k, link=Link(rate=2e8)) for k in (1, 2, 4)]


@pytest.mark.parametrize(("row", "more"), [("hub-bsp", 0.1), ("hub-asp", 0.0)])
def test_overhead_is_the_same_for_any_number_of_servers(row: str, more: float) -> None:
    # Of hub-asp, waiting in a server's line is not taken for computing.
    rows = [
        entry(row, each, more + predict(CONSTANTS, row, each, THEIRS).step_seconds, compute=THEIRS.compute)
        for each in SERVERS
    ]
    predictions = score(findings(SERVERS, rows)).predictions()
    assert [each.error for each in predictions] == pytest.approx([0.0] * 3, abs=1e-9)


def test_runs_with_a_fault_are_not_predicted_unless_it_leaves_their_row_alone() -> None:
    settings = [replace(LINKED, fault=fault) for fault in (None, Fault(victim="shard", step=9))]
    rows = [entry(row, each, 1.0) for row in ("ring", "hub-bsp") for each in settings]
    found = score(findings(settings, rows)).predictions()
    assert [(each.row, each.setting) for each in found] == [(row, LINKED.key) for row in ("ring", "hub-bsp")]


def test_emulated_computing_is_no_overhead() -> None:
    slept = replace(LINKED, compute=0.2)
    steps = {k: predict(CONSTANTS, "hub-bsp", replace(slept, servers=k), THEIRS).step_seconds for k in (1, 4)}
    rows = [entry("hub-bsp", replace(slept, servers=k), step, compute=0.25) for k, step in steps.items()]
    found = findings([replace(slept, servers=k) for k in steps], rows)
    assert rounded(Score.accuracy(score(found).predictions())) == Accuracy(0.0, 1)
