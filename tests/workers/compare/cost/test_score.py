"""Predictions are scored beside what was measured, each once, and not where they were calibrated."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hubring.workers.compare.cost.measured import model_bytes, points
from hubring.workers.compare.cost.score import Score
from hubring.workers.compare.result.findings import Accuracy
from tests.support.compare.modelled import entry, experiment, listed, rounded, score


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


def test_what_is_predicted_wrongly_is_said() -> None:
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


def test_a_single_process_does_not_scale() -> None:
    found = experiment()
    alone = replace(found, rows=[*found.rows, entry("local", found.settings[0], 0.1)])
    assert {each.row for each in score(alone).scaling()} == {"ring", "hub-bsp"}


def test_withheld_and_unknown_rows_are_left_out() -> None:
    found = experiment()
    first, second, third, *others = found.rows
    rows = [
        replace(first, withheld="wrong"),
        replace(second, row="gossip"),
        replace(third, numbers={**third.numbers, "step_ms": None}),
    ]
    assert len(points(found.settings, [*rows, *others])) == 5
