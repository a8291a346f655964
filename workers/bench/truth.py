"""What the ranks' gradients are, and what parameters must come of them.

All is periodic, so that one period, stepped by torch's own optimizer on the
mean, tells every element of every tensor. The ranks' gradients rise and fall
from step to step, each in its own way: a lost rank or a lost step then leaves
other parameters under Adam too, which does not see a constant factor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from workers.bench.model import optimizer_of

PERIOD = 1024
"""Gradients repeat after so many elements of a tensor, and so must the parameters."""
_TILE_PERIODS = 256
"""Parameters are compared in pieces that stay in the cache."""


class Truth:
    """Follows a job step by step.

    Args:
        optimizer: The job's.
        size: How many ranks give gradients.
    """

    def __init__(self, optimizer: str, size: int) -> None:
        self._size = size
        self._pattern = torch.arange(PERIOD) % 7 + 1.0
        self._expected = nn.Parameter(torch.zeros(PERIOD))
        self._optimizer = optimizer_of(optimizer, [self._expected])
        self._step = 0

    def write(self, gradients: Iterable[Tensor], rank: int) -> None:
        """Fills flat gradients with what this rank's are in the step to come, as backward would."""
        period = self._pattern * _weight(rank, self._step)
        for gradient in gradients:
            whole = gradient.numel() // PERIOD * PERIOD
            gradient[:whole].view(-1, PERIOD).copy_(period)
            gradient[whole:].copy_(period[: gradient.numel() - whole])

    def advance(self) -> None:
        """Takes the step."""
        weights = [_weight(rank, self._step) for rank in range(self._size)]
        self._expected.grad = self._pattern * (sum(weights) / self._size)
        self._optimizer.step()
        self._step += 1

    def wrong(self, values: Iterable[Tensor]) -> int:
        """How many elements of flat parameters are not what they must be by now."""
        tile = self._expected.detach().repeat(_TILE_PERIODS)
        parts = (part for each in values for part in torch.split(each, tile.numel()))
        return sum(_wrong(part, tile[: part.numel()]) for part in parts)


def _weight(rank: int, step: int) -> int:
    return 1 + (rank + step * (rank + 1)) % 5


def _wrong(found: Tensor, expected: Tensor) -> int:
    if torch.equal(found, expected):  # nearly always, and ten times as fast
        return 0
    return int((~torch.isclose(found, expected, rtol=1e-5, atol=0.0)).sum())
