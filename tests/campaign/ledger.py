"""The oracle: a tensor in which each push adds one to a slot of its own.

`ledger[step, rank]` belongs to the push of one rank in one step. Its gradient is -1 there and zero elsewhere,
and the learning rate is 1. Where pushes are applied one by one, an applied push leaves 1. Where a round
applies the mean over k contributors, each leaves 1/k. Rows from `steps` on belong to no push and stay zero;
they are most of the payload, so that a changed bit on the wire shows. All slots of pushes are in one slice,
since the contributors of a round can differ between slices.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ROWS = 2048
ROUNDING = 1e-5
"""The difference between 1/k and its sum in 32 bits, at most."""


def pushes(ledger: Tensor, steps: int) -> list[list[float]]:
    """Returns what the pushes of each step left, by step and rank."""
    return ledger[:steps].tolist()


def foreign(ledger: Tensor, steps: int) -> list[str]:
    """Returns the slots that hold what no push can have left there."""
    found = []
    for row, rank in (ledger[steps:] != 0).nonzero().tolist():
        value = ledger[steps + row, rank].item()
        found.append(f"slot ({steps + row}, {rank}) of no push holds {value:g}")
    return found


def applied_wrongly(ledger: Tensor, steps: int, mean: bool) -> list[str]:
    """Returns the pushes that were applied more than once, or in part.

    Args:
        ledger: Float tensor of shape [ROWS, workers].
        steps: Steps of the job.
        mean: Whether a round applies the mean over its contributors, which are all of that step.
    """
    found = []
    for step, row in enumerate(pushes(ledger, steps)):
        count = sum(value != 0 for value in row)
        share = 1.0 / count if mean and count else 1.0
        found += _other_than(row, step, {share})
    return found


def counted_wrongly(ledger: Tensor, steps: int, rounds: int) -> list[str]:
    """Returns what is wrong where a round applies the mean over the first gradients, of whatever step.

    A round has fewer contributors once workers have left. The shares of each round add up to one.

    Args:
        ledger: Float tensor of shape [ROWS, workers].
        steps: Steps of the job.
        rounds: Rounds that the values include; -1 if unknown.
    """
    found = []
    for step, row in enumerate(pushes(ledger, steps)):
        found += _other_than(row, step, {1 / count for count in range(1, len(row) + 1)})
    total = ledger[:steps].sum().item()
    if rounds >= 0 and abs(total - rounds) > 100 * ROUNDING:
        found.append(f"the shares of all rounds add up to {total:g}, expected {rounds}")
    return found


def _other_than(row: list[float], step: int, shares: set[float]) -> list[str]:
    expected = " or ".join(f"{share:g}" for share in sorted(shares))
    return [
        f"the push of rank {rank} in step {step} left {value:g}, expected {expected}"
        for rank, value in enumerate(row)
        if value != 0 and not any(abs(value - share) < ROUNDING for share in shares)
    ]


def missing(ledger: Tensor, acknowledged: Iterable[tuple[int, int]]) -> list[str]:
    """Returns the acknowledged pushes that left nothing.

    Args:
        ledger: Float tensor of shape [ROWS, workers].
        acknowledged: Step and rank of each.
    """
    return [
        f"the push of rank {rank} in step {step} was acknowledged and left nothing"
        for step, rank in sorted(set(acknowledged))
        if ledger[step, rank].item() == 0
    ]


def unfilled(ledger: Tensor, steps: int) -> list[str]:
    """Returns the rounds that applied no push, or whose shares do not add up to one."""
    sums = ledger[:steps].sum(1)
    wrong = (~torch.isclose(sums, torch.ones_like(sums), atol=10 * ROUNDING)).nonzero().flatten().tolist()
    return [f"the shares of step {step} add up to {sums[step].item():g}, expected 1" for step in wrong]
