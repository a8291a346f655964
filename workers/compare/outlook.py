"""What the model of cost says beside what was measured, as far as it was calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.compare.cost.constants import Constants
from workers.compare.cost.measured import setting_of, told_bytes
from workers.compare.cost.prediction import Job
from workers.compare.cost.score import Score
from workers.compare.scaling import crossovers, scaling


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
    job = Job(model_bytes=told, together=True, slice_bytes=found["experiment"].get("slice_bytes"))
    model = Score(found, constants, job)
    crossover = crossovers(settings, rows, lambda setting: model.crossover(setting_of(setting)))
    return {**model.as_json(), "crossover": crossover}
