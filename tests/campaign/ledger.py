"""The oracle: a tensor in which each push adds one to a slot of its own.

`ledger[rank, step]` belongs to the push of one rank in one step. Its gradient is -1 there and zero elsewhere,
and the learning rate is 1. Where pushes are applied one by one, an applied push leaves 1. Where a round applies
the mean over k contributors, each leaves 1/k. Columns from `steps` on belong to no push and stay zero; they are
most of the payload, so that a changed bit on the wire shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

WIDTH = 2048
"""Columns."""
ROUNDING = 1e-5
"""The difference between 1/k and its sum in 32 bits, at most."""


def columns(ledger: Tensor, steps: int) -> list[list[float]]:
    """Returns what the pushes of each step left, by step and rank."""
    return ledger[:, :steps].T.tolist()


def foreign(ledger: Tensor, steps: int) -> list[str]:
    """Returns the slots that hold what no push can have left there."""
    found = []
    for rank, step in (ledger != 0).nonzero().tolist():
        value = ledger[rank, step].item()
        if step >= steps:
            found.append(f"slot ({rank}, {step}) of no push holds {value:g}")
    return found


def applied_wrongly(ledger: Tensor, steps: int, mean: bool) -> list[str]:
    """Returns the pushes that were applied more than once, or in part.

    Args:
        ledger: Float tensor of shape [workers, WIDTH].
        steps: Steps of the job.
        mean: Whether a round applies the mean over its contributors.
    """
    found = []
    for step, column in enumerate(columns(ledger, steps)):
        count = sum(value != 0 for value in column)
        share = 1.0 / count if mean and count else 1.0
        for rank, value in enumerate(column):
            if value != 0 and not abs(value - share) < ROUNDING:
                found.append(f"the push of rank {rank} in step {step} left {value:g}, expected {share:g}")
    return found


def missing(ledger: Tensor, acknowledged: Mapping[int, int]) -> list[str]:
    """Returns the acknowledged pushes that left nothing.

    Args:
        ledger: Float tensor of shape [workers, WIDTH].
        acknowledged: By rank: the steps that it completed, from the first on.
    """
    return [
        f"the push of rank {rank} in step {step} was acknowledged and left nothing"
        for rank, steps in acknowledged.items()
        for step in range(steps)
        if ledger[rank, step].item() == 0
    ]


def unfilled(ledger: Tensor, steps: int) -> list[str]:
    """Returns the rounds that applied no push, or whose shares do not add up to one."""
    sums = ledger[:, :steps].sum(0)
    wrong = (~torch.isclose(sums, torch.ones_like(sums), atol=10 * ROUNDING)).nonzero().flatten().tolist()
    return [f"the shares of step {step} add up to {sums[step].item():g}, expected 1" for step in wrong]
