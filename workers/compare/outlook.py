"""What the model of cost says beside what was measured, as far as it was calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.compare.cost.constants import Constants
from workers.compare.cost.measured import told_bytes
from workers.compare.cost.prediction import Job
from workers.compare.cost.score import Score
from workers.compare.scaling import crossovers, scaling


def outlook(found: Mapping[str, Any], constants: Constants | None) -> dict[str, Any]:
    """`predictions`, `score`, `crossover` and `scaling` of the results.

    Args:
        found: The results, as far as they were measured.
        constants: Of the machine or cluster that it ran on; None: nobody measured them.
    """
    crossover = crossovers(found["settings"], found["rows"])
    told = told_bytes(found)
    if constants is None or told is None:
        scales = scaling(found["settings"], found["rows"])
        return {"predictions": [], "score": None, "crossover": crossover, "scaling": scales}
    job = Job(model_bytes=told, together=True, slice_bytes=found["experiment"].get("slice_bytes"))
    model = Score(found, constants, job).as_json()
    modelled = {each["setting"]: each["predicted"] for each in model["crossover"]}
    return model | {
        "crossover": [{**each, "modelled": modelled.get(each["setting"])} for each in crossover],
    }
