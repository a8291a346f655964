"""What the model of cost says beside what was measured, as far as it was calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hubring.workers.compare.cost.constants import Constants
from hubring.workers.compare.cost.measured import setting_of, told_bytes
from hubring.workers.compare.cost.prediction import Job
from hubring.workers.compare.cost.score import Score
from hubring.workers.compare.judge.scaling import crossovers, scaling

OPTIMIZERS = {"char-lm": "adam"}
"""What a shipped job steps with, where that is not SGD."""


def outlook(found: Mapping[str, Any], constants: Constants | None) -> dict[str, Any]:
    """`predictions`, `score`, `crossover` and `scaling` of the results.

    Args:
        found: The results, as far as they were measured.
        constants: Of the machine or cluster that it ran on; None: nobody measured them.
    """
    settings, rows, told = found["settings"], found["rows"], told_bytes(found)
    if constants is None or told is None:
        crossover, scales = crossovers(settings, rows), scaling(settings, rows)
        return {"predictions": [], "score": None, "crossover": crossover, "scaling": scales}
    model = Score(found, constants, _job(found["experiment"], told))
    known = {"ring", "hub-bsp"} <= model.calibrated
    foreseen = (lambda setting: model.crossover(setting_of(setting))) if known else None
    crossover, answer = crossovers(settings, rows, foreseen), model.as_json()
    rest = [each for each in scaling(settings, rows) if each["row"] not in model.calibrated]
    return {**answer, "crossover": crossover, "scaling": [*answer["scaling"], *rest]}


def _job(experiment: Mapping[str, Any], model_bytes: int) -> Job:
    """What was trained, and by which wire."""
    wire = experiment.get("transport", "auto")
    return Job(
        model_bytes=model_bytes,
        optimizer=OPTIMIZERS.get(experiment.get("job") or "", "sgd"),
        wire="" if wire == "auto" else wire,
        together=True,
        slice_bytes=experiment.get("slice_bytes"),
    )
