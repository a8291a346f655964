"""A run of several optimizers shows the first fault whole, and every optimizer is judged."""

from __future__ import annotations

from typing import Any

import pytest

from hubring.workers.compare.gate import asynchronous_steps, synchronous_steps
from hubring.workers.compare.gate.recorded_steps import RecordedStep
from hubring.workers.compare.gate.same_parameters import STEP_TOLERANCE
from hubring.workers.compare.gate.step_reference import Checked
from tests.support.compare.audited import Script, train
from tests.support.compare.correct_scripts import SCRIPTS
from tests.support.compare.planted import PLANTED

pytestmark = pytest.mark.slow


def test_the_first_fault_is_reported_with_its_own_step() -> None:
    first, later = Checked(3, 0, fault="all steps together", step=0), Checked(3, 2, "why", "later", 2)
    both = Checked.of_all([Checked(3, 3), first, later])
    assert (both.fault, both.step) == ("all steps together", 0)
    assert (both.taken, both.judged, both.unjudged) == (9, 5, "why")
    assert not both.complete
    assert Checked.of_all([Checked(3, 2, open=1), Checked(2, 2)]).complete


def steps_of(row: str, name: str = "") -> list[dict[int, list[RecordedStep]]]:
    planted = PLANTED.get(name)
    if planted is None:
        return [rank.trainers for rank in train(row, Script()).ranks]
    with planted.plant():
        return [rank.trainers for rank in train(row, planted.script).ranks]


def beside(first: list[dict[int, Any]], second: list[dict[int, Any]]) -> list[dict[int, Any]]:
    return [{0: one[0], 1: other[0]} for one, other in zip(first, second, strict=True)]


def test_an_optimizer_behind_another_is_judged() -> None:
    wrong = steps_of("ring", "a rank sends nothing once, on a ring")
    checked = synchronous_steps.check(beside(steps_of("ring"), wrong), STEP_TOLERANCE)
    assert (checked.step, "rank 1 had sent nothing" in checked.fault) == (9, True)


def test_an_optimizer_behind_one_that_is_not_replayed_is_judged() -> None:
    closure = [rank.trainers for rank in train("hub-asp", SCRIPTS["closure"]).ranks]
    wrong = steps_of("hub-asp", "an asynchronous push is applied twice")
    checked = asynchronous_steps.check(beside(closure, wrong), STEP_TOLERANCE)
    assert checked.unjudged == "the script runs code within step()"
    assert checked.fault
