"""Opposite winners in many reports are those of the same two rows."""

from __future__ import annotations

import pytest

from tests.support.compare.winners import opposite

WINS = "The hub (hub-bsp) beats the ring: 200 images/s against 100, a factor of 2.00."
LOSES = "The hub (hub-bsp) loses to the ring: 100 images/s against 200, a factor of 2.00."
ALONE = "Hub-bsp loses to a single process: 100 images/s against 200, a factor of 2.00."


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([[WINS], [LOSES]], True),
        ([[WINS, ALONE], [], [ALONE, LOSES]], True),
        ([[WINS, ALONE], [WINS]], False),
        ([[], []], False),
    ],
)
def test_only_one_pair_of_rows_can_have_opposite_winners(said: list[list[str]], expected: bool) -> None:
    assert opposite(said) is expected
