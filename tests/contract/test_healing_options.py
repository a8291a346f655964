"""What a ring that heals refuses, and which ways to train it supports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.ring.healing.healing_ring import HealingRing
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.models import squares
from tests.reports.training import momentum, seeded, take, values
from tests.support.training.healing import HealingRanks, together

pytestmark = pytest.mark.slow

STEPS, LOST_IN = 6, 3


def at(step: int) -> list[int]:
    """Returns the ranks that train in a step. Behind the step with the loss they are new."""
    return [0, 1, 2] if step < LOST_IN else [0, 2] if step == LOST_IN else [0, 1]


def linear(outputs: int) -> nn.Linear:
    return seeded(lambda: nn.Linear(3, outputs))


def alone(passes: int = 1) -> list[torch.Tensor]:
    """Returns what one process trains with the ranks of each step, in so many backward passes a step."""
    model = linear(2)
    optimizer = momentum(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            ranks = at(step)
            torch.stack([squares(model, passes * step + part, rank) for rank in ranks]).mean().backward()
        optimizer.step()
    return values(model)


def test_optimizers_that_take_turns_go_on() -> None:
    """The member is lost when one of two optimizers has stepped."""
    ranks = HealingRanks(3)

    def live(ring: HealingRing) -> Any:
        models = [linear(2), linear(4)]
        optimizers = [DistributedOptimizer(momentum(model), model, communicator=ring) for model in models]
        known = []
        for step in range(STEPS):
            for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if (ring.rank, step, place) == (1, LOST_IN, 1) and ring.size == 3:
                    return ranks.lose(1)
                known.append(ring.rank)
                take(optimizer, squares(model, step, ring.rank))
            ring.between_steps(step + 1)
        return known, [value for model in models for value in values(model)]

    (first, trained), _, (last, other) = together(ranks, live)
    torch.testing.assert_close(trained, other, rtol=0, atol=0)
    assert (first[-1], last[-1]) == (0, 1)
    expected = []
    for place, model in enumerate([linear(2), linear(4)]):
        optimizer = momentum(model)
        for step in range(STEPS):
            lost = [1] if (step, place) <= (LOST_IN, 0) else []
            present = [first[2 * step + place], *lost, last[2 * step + place]]
            take(optimizer, torch.stack([squares(model, step, rank) for rank in present]).mean())
        expected += values(model)
    torch.testing.assert_close(trained, expected)


@pytest.mark.parametrize(
    ("passes", "compress", "rtol", "atol"), [(2, "", None, None), (1, "bf16", 0.05, 0.01)]
)
def test_accumulated_and_compressed_gradients_are_exchanged_again(
    passes: int, compress: str, rtol: float | None, atol: float | None
) -> None:
    """The member is lost before the last backward pass of a step."""
    ranks = HealingRanks(3, compress=compress)

    def live(ring: HealingRing) -> Any:
        model = linear(2)
        optimizer = DistributedOptimizer(
            momentum(model), model, backward_passes_per_step=passes, communicator=ring, bucket_bytes=8
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(passes):
                if (ring.rank, step, part) == (1, LOST_IN, passes - 1) and ring.size == 3:
                    return ranks.lose(1)
                squares(model, passes * step + part, ring.rank).backward()
            optimizer.step()
            ring.between_steps(step + 1)
        return values(model)

    first, _, last = together(ranks, live)
    torch.testing.assert_close(first, last, rtol=0, atol=0)
    torch.testing.assert_close(first, alone(passes), rtol=rtol, atol=atol)


def test_a_step_that_ends_before_its_exchange_is_refused() -> None:
    def live(ring: HealingRing) -> Any:
        model = linear(2)
        with pytest.raises(ConfigError, match="remove cross_barrier=True or --min-workers"):
            DistributedOptimizer(momentum(model), model, communicator=ring, cross_barrier=True)

    together(HealingRanks(2), live)
