"""What is predicted beside what was measured, as far as it was calibrated."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hubring.workers.compare.decide.decision import Comparisons
from hubring.workers.compare.decide.reasons import crossovers
from hubring.workers.compare.findings import Accuracy, Findings
from hubring.workers.compare.plan.setting import Link, Setting
from hubring.workers.compare.predict.calibrations import Constants
from hubring.workers.compare.predict.prediction import PredictedJob, predict
from hubring.workers.compare.predict.score import calibrated, predicted
from hubring.workers.compare.predict.slicing import tensors
from tests.support.compare.calibration import (
    CONSTANTS,
    FINE,
    THEIRS,
    WIRE,
    entry,
    experiment,
    findings,
    listed,
    rounded,
    with_pauses,
)


def predicted_of(found: Findings, constants: Constants | None) -> Findings:
    model = calibrated(found, constants)
    compared = Comparisons(predicted(found, model))
    return replace(compared.findings, crossover=crossovers(compared, model))


@pytest.mark.parametrize(("job", "measured", "foreseen"), [(FINE, 4, 3), (THEIRS, None, 5)])
def test_a_crossover_is_measured_and_predicted_side_by_side(
    job: PredictedJob, measured: int | None, foreseen: int
) -> None:
    found = predicted_of(listed(experiment(job)), CONSTANTS).crossover
    assert [each.setting for each in found] == ["n4 1000mbit", "n4 200mbit"]
    for each in found:
        assert each.tried == [1, 2, 4]
        assert (each.measured, each.predicted, each.by_bytes) == (measured, foreseen, 3)
        assert each.calibrated


def test_without_a_calibration_a_crossover_is_measured_only() -> None:
    first = predicted_of(listed(experiment(FINE)), None).crossover[0]
    assert (first.measured, first.predicted, first.calibrated) == (4, None, False)


def test_runs_with_nccl_are_not_predicted_since_the_constants_are_of_gloo() -> None:
    gloo = listed(experiment(FINE))
    assert predicted_of(gloo, CONSTANTS).predictions
    nccl = replace(gloo, asked=replace(gloo.asked, backend="nccl"))
    assert predicted_of(nccl, CONSTANTS) == predicted_of(nccl, None)


def test_a_row_that_nothing_calibrated_is_neither_predicted_nor_scored() -> None:
    found = predicted_of(with_pauses(), CONSTANTS)
    assert (found.predictions, found.score) == ([], None)
    calm = Setting(workers=4)
    slow = with_pauses()
    ring = entry("ring", calm, predict(CONSTANTS, "ring", calm, THEIRS).step_seconds)
    both = replace(slow, settings=[*slow.settings, calm], rows=[*slow.rows, ring])
    found = predicted_of(both, CONSTANTS)
    assert {each.row for each in found.predictions} == {"ring"}
    assert found.score is not None
    assert found.score.predictions == 3
    assert {each.row for each in found.scaling} == {"ring", "hub-bsp"}


@pytest.mark.parametrize("wire", ["zmq", "grpc"])
@pytest.mark.parametrize("link", [None, Link(rate=1e9)])
def test_a_prediction_is_for_the_wire_that_the_experiment_took(wire: str, link: Link | None) -> None:
    dear = replace(WIRE, beta=4e-8)
    constants = replace(CONSTANTS, wires={**CONSTANTS.wires, wire: dear})
    job = replace(THEIRS, wire=wire, tensors=tensors("digits", THEIRS.nbytes))
    settings = [Setting(workers=4, servers=count, link=link) for count in (1, 4)]
    rows = [
        entry("hub-bsp", setting, predict(constants, "hub-bsp", setting, job).step_seconds)
        for setting in settings
    ]
    found = predicted_of(findings(settings, rows, transport=wire), constants)
    assert rounded(found.score) == Accuracy(0.0, 1)
