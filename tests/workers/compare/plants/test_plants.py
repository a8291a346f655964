"""Every plant is named in the report, and no clean control is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.workers.compare.plants import broken_rules, equal_conditions, other_rows, same_work
from tests.workers.compare.plants.frame import Plant, alarms

KINDS = (same_work, broken_rules, equal_conditions, other_rows)
"""Files of plants. Each has `PLANTS` and `CONTROLS` by name."""

PLANTS = {name: plant for kind in KINDS for name, plant in kind.PLANTS.items()}
CONTROLS = {name: plant for kind in KINDS for name, plant in kind.CONTROLS.items()}

FULL = {
    *(
        "five weights are frozen, adam",
        "a large layer, adam",
        "torch's sampler, which repeats samples",
        "adam",
    ),
    *("no shuffling", "the last batch is kept", "a schedule", "another seed of the sampler", "one epoch"),
    *("a row is stepped wrongly on the ring, adam", "a row is stepped wrongly on the hub, sgd"),
    *("a row is changed between the steps of the ring", "a tall layer, sgd", "a tall layer, adam"),
    *("a tall layer, rmsprop", "a tall layer, adagrad", "a tall layer, nadam"),
    *("scaled", "recomputed activations", "an uneven last batch with weights", "clipped", "a closure"),
}
"""Those that train rows of their own, and are much like others."""

pytestmark = pytest.mark.slow


def parameters(plants: Mapping[str, Plant]) -> list[Any]:
    full = {name: [pytest.mark.full] if name in FULL else [] for name in plants}
    return [pytest.param(plant, id=name, marks=full[name]) for name, plant in plants.items()]


@pytest.mark.parametrize("plant", parameters(PLANTS))
def test_a_plant_is_named(plant: Plant, tmp_path: Path) -> None:
    said = "\n".join(alarms(plant.findings(tmp_path)))
    for part in plant.says:
        assert part in said


@pytest.mark.parametrize("control", parameters(CONTROLS))
def test_a_control_raises_no_alarm(control: Plant, tmp_path: Path) -> None:
    assert alarms(control.findings(tmp_path)) == []
