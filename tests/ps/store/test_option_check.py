"""A learning rate that one rank alone changes is named."""

from __future__ import annotations

import pytest

from hubring.ps.store.consistency import ASP, BSP, Consistency
from tests.support.store import ADD, hub, push


@pytest.mark.parametrize(("consistency", "times"), [(BSP(), 1), (ASP(), 0)])
def test_ranks_in_lockstep_that_differ_in_an_option_are_named_once(
    consistency: Consistency, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = hub(consistency, 3)
    for step in range(3):
        for rank in range(3):
            halved = rank == 2 and step > 0
            store.handle(push(rank, step, hyper={**ADD, "lr": 0.05 if halved else 0.1}), (step, rank))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == times
    for text in told:
        assert (
            "rank 0 has lr=0.1 in step 2, and rank 2 has lr=0.05; the hub steps with those of rank 0" in text
        )
        assert "hubring.allreduce" in text
