"""Hub, ring and one process end in the same parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.contract.two_groups import (
    ATOL,
    RTOL,
    TwoAggregating,
    TwoOnAHub,
    TwoOnARing,
    adamw,
    momentum_sgd,
    train_two_groups,
)
from tests.support.training.ranks import LocalRanks, Ranks


@pytest.mark.parametrize("make", [momentum_sgd, adamw])
def test_hub_ring_and_one_process_end_in_the_same_parameters(make: Any) -> None:
    def ends(kind: type[Ranks]) -> list[torch.Tensor]:
        ranks = kind()
        first, *others = ranks.run(partial(train_two_groups, make=make))
        ranks.close()
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
        return first

    alone = ends(LocalRanks)
    for kind in (TwoOnAHub, TwoAggregating, TwoOnARing):
        torch.testing.assert_close(ends(kind), alone, rtol=RTOL, atol=ATOL)
    for kind in (TwoOnAHub, TwoAggregating):
        assert all(torch.equal(one, two) for one, two in zip(ends(kind), ends(kind), strict=True))
