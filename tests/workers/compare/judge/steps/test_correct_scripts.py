"""The gate is silent on scripts that train correctly, on every row."""

from __future__ import annotations

import pytest

from tests.support.compare.audited import Trained, train
from tests.support.compare.correct_scripts import SCRIPTS
from tests.support.sampled import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]

NOT_REPLAYED = {"closure", "closure, adam"}
"""What steps is not known outside of `step()`, so only the exchange is judged."""

NO_ASP = {
    "across the barrier",
    "across the barrier, adam",
    "parameters within bounds",
    "overflowing",
    "ranks with fewer batches",
}
"""An asynchronous hub does not have these, or has no steps in common."""


def silent(name: str, trained: Trained, alone: Trained | None = None) -> None:
    found = trained.check(alone)
    assert (found.checked.fault, found.advice) == ("", "")
    assert found.checked.taken > 0
    expected = 0 if name in NOT_REPLAYED else found.checked.taken
    assert found.checked.judged == expected, found.checked.unjudged


def test_there_are_enough_scripts() -> None:
    assert len(SCRIPTS) >= 50


@pytest.mark.parametrize("name", sampled(SCRIPTS))
def test_a_correct_script_raises_no_alarm(name: str) -> None:
    alone = train("local", SCRIPTS[name])
    silent(name, alone)
    for row in ("ring", "hub-bsp"):
        silent(name, train(row, SCRIPTS[name]), alone)


@pytest.mark.parametrize("name", sampled(name for name in list(SCRIPTS)[::4] if name not in NO_ASP))
@pytest.mark.parametrize("row", ["hub-asp", "hub-aggregate"])
def test_a_correct_script_raises_no_alarm_on_other_hubs(name: str, row: str) -> None:
    silent(name, train(row, SCRIPTS[name]))
