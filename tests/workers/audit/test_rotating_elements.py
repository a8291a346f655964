"""Other elements have their turn: the claim of workers/compare/README.md about rows of large layers."""

from __future__ import annotations

import pytest
import torch

from hubring.workers.audit import rotating_elements
from hubring.workers.audit.rotating_elements import MOST, PERIOD, OtherElements
from hubring.workers.audit.sample import TappedParameter, sample


@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("rows", [600, 5_000, 15_000])
def test_nine_of_ten_rows_have_their_turn_within_100_steps(rows: int, width: int) -> None:
    weight = torch.zeros(rows, width)
    chosen = sample("weight", weight.numel(), 1)
    one = TappedParameter("weight", weight, weight, chosen, slice(0, chosen.number), chosen, None)
    for begin in (0, 1000):
        seen = set[int]()
        for step in range(begin + PERIOD - begin % PERIOD, begin + 101, PERIOD):
            (other,) = OtherElements(step, [one]).parameters
            assert other.sample.number <= MOST
            seen |= {element // width for element in other.sample.elements}
        assert len(seen) >= 0.9 * rows


def test_parameters_of_a_large_model_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotating_elements, "AT_ONCE", 100)
    tensors = {name: torch.zeros(60) for name in "abc"}
    chosen = sample("a", 60, 3)
    known = [
        TappedParameter(name, each, each, chosen, slice(0, 8), chosen, None) for name, each in tensors.items()
    ]
    turns = [list(OtherElements(turn * PERIOD, known).due) for turn in (1, 2, 3)]
    assert turns == [["c"], ["a", "b"], ["c"]]
