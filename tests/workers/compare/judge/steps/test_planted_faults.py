"""The gate catches every planted fault, and nothing where the fault is missing."""

from __future__ import annotations

import pytest

from tests.support.compare.audited import train
from tests.support.compare.planted import IN_SCRIPT, PLANTED
from tests.support.sampled import sampled

pytestmark = pytest.mark.slow

HEALTHY = {
    planted.row + repr(planted.script): name for name, planted in PLANTED.items() if name not in IN_SCRIPT
}
"""One fault of each row and script."""


def test_there_are_enough_faults() -> None:
    assert len(PLANTED) >= 25


@pytest.mark.parametrize("name", sampled(PLANTED))
def test_a_planted_fault_is_caught(name: str) -> None:
    planted = PLANTED[name]
    alone = train("local", planted.script) if name in IN_SCRIPT else None
    with planted.plant():
        trained = train(planted.row, planted.script)
    checked = trained.check(alone).checked
    assert checked.fault, f"{name} was missed in {checked.judged} of {checked.taken} steps"
    assert planted.says in checked.fault


@pytest.mark.parametrize("name", sampled(HEALTHY.values()))
def test_the_same_training_without_the_fault_is_right(name: str) -> None:
    checked = train(PLANTED[name].row, PLANTED[name].script).check().checked
    assert checked.complete, checked
