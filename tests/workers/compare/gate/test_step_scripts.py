"""The gate is silent on scripts that train correctly, on every row, and catches every planted fault."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hubring.workers.compare.gate.step_checks import UNKNOWN
from tests.support.compare.audited import Trained, train
from tests.support.compare.correct_scripts import SCRIPTS
from tests.support.compare.planted import IN_SCRIPT, PLANTED
from tests.support.compare.unusual_scripts import UNUSUAL


def sampled(names: Iterable[str], every: int = 8) -> list[object]:
    """Returns parameters of which one in `every` runs in `make test`, and the others in `make test-full`."""
    return [pytest.param(name, marks=pytest.mark.full if at % every else ()) for at, name in enumerate(names)]


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")]

NOT_REPLAYED = {"closure", "momentum zeroed", "momentum cleared"}
"""What steps is not known outside of `step()`, so only the exchange is judged."""

OPEN_ENDED = {"across the barrier"}
"""The parameters after the last step are not known."""

NO_ASP = {"parameters within bounds", "overflowing", "ranks with fewer batches"}
"""An asynchronous hub does not have these, or has no steps in common."""


def silent(name: str, trained: Trained, alone: Trained | None = None) -> None:
    found = trained.check(alone)
    # Only this script never calls its model.
    assert (found.checked.fault, found.advice) == ("", UNKNOWN if name == "gradients by hand" else "")
    assert found.checked.taken > 0
    if name in NOT_REPLAYED:
        assert found.checked.unjudged
        assert found.checked.judged == 0
        return
    assert found.checked.complete, found.checked
    assert found.checked.open == 0 or name in OPEN_ENDED


@pytest.mark.parametrize("name", sampled(SCRIPTS))
def test_a_correct_script_raises_no_alarm(name: str) -> None:
    alone = train("local", SCRIPTS[name])
    silent(name, alone)
    for row in ("ring", "hub-bsp"):
        silent(name, train(row, SCRIPTS[name]), alone)


@pytest.mark.parametrize(
    "name",
    sampled(
        name for name in dict.fromkeys([*list(SCRIPTS)[::4], *UNUSUAL, *OPEN_ENDED]) if name not in NO_ASP
    ),
)
@pytest.mark.parametrize("row", ["hub-asp", "hub-aggregate"])
def test_a_correct_script_raises_no_alarm_on_other_hubs(name: str, row: str) -> None:
    silent(name, train(row, SCRIPTS[name]), train("local", SCRIPTS[name]))


@pytest.mark.parametrize("name", sampled(PLANTED))
def test_a_planted_fault_is_caught(name: str) -> None:
    planted = PLANTED[name]
    alone = train("local", planted.script) if name in IN_SCRIPT else None
    with planted.plant():
        trained = train(planted.row, planted.script)
    checked = trained.check(alone).checked
    assert checked.fault, f"{name} was missed in {checked.judged} of {checked.taken} steps"
    assert planted.says in checked.fault
