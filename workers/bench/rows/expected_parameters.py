"""What the ranks' gradients are, and what parameters must come of them.

All is periodic, so that one period, stepped by torch's own optimizer on the
mean, tells every element of the model. The period is a prime: it divides no
slice, bucket or page, so that what lands in another's place is seen. No two
elements' gradients differ by a factor alone, nor do the ranks', and both change
from step to step: Adam, which does not see a constant factor, then tells a
misplaced element, a lost rank and a lost step too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hubring.workers.bench.rows.model import optimizer_of

PERIOD = 1021
"""Gradients repeat after so many elements of the model, and so must the parameters."""
_SCATTER = 389
"""Neighbours are this far apart in size, so that hardly any block looks like the one beside it."""
_TILE_PERIODS = 256
"""Parameters are compared in pieces that stay in the cache."""


class Truth:
    """Follows a job step by step.

    Args:
        optimizer: The job's.
        size: How many ranks give gradients.
        slack: Of the largest parameter: how far any may be off; 0: as far as rounding goes.
    """

    def __init__(self, optimizer: str, size: int, slack: float = 0.0) -> None:
        self._size = size
        self._slack = slack
        self._pattern = torch.arange(PERIOD) * _SCATTER % PERIOD + 1.0
        self._expected = nn.Parameter(torch.zeros(PERIOD))
        self._optimizer = optimizer_of(optimizer, [self._expected])
        self._step = 0
        self._numel = 0

    def write(self, gradients: Iterable[Tensor], rank: int) -> None:
        """Fills flat gradients with what this rank's are in the step to come, as backward would."""
        given = list(gradients)
        period = self._period(rank).to(given[0].device)
        self._numel = sum(gradient.numel() for gradient in given)
        for gradient, start in zip(given, self._starts(given), strict=True):
            turned = period.roll(-start)
            whole = gradient.numel() // PERIOD * PERIOD
            gradient[:whole].view(-1, PERIOD).copy_(turned)
            gradient[whole:].copy_(turned[: gradient.numel() - whole])

    def advance(self) -> None:
        """Takes the step."""
        self._expected.grad = (
            sum((self._period(rank) for rank in range(self._size)), torch.zeros(())) / self._size
        )
        self._optimizer.step()
        self._step += 1

    def wrong(self, values: Iterable[Tensor]) -> int:
        """How many elements of flat parameters are not what they must be, in one copy or more."""
        given = [each.cpu() for each in values]
        tile = self._expected.detach().repeat(_TILE_PERIODS + 1)
        return sum(
            self._wrong(part, tile[start : start + part.numel()])
            for each, start in zip(given, self._starts(given), strict=True)
            for part in torch.split(each, _TILE_PERIODS * PERIOD)
        )

    def _period(self, rank: int) -> Tensor:
        weight = 1 + (rank + self._step * (rank + 1)) % 5
        return self._pattern.roll(self._step) * weight

    def _starts(self, tensors: Sequence[Tensor]) -> Iterator[int]:
        """Where in the period each tensor begins; a copy of the model begins where the first did."""
        place = 0
        for tensor in tensors:
            yield place % self._numel % PERIOD
            place += tensor.numel()

    def _wrong(self, found: Tensor, expected: Tensor) -> int:
        if torch.equal(found, expected):  # nearly always, and ten times as fast
            return 0
        if not self._slack:
            return int((~torch.isclose(found, expected, rtol=1e-5, atol=0.0)).sum())
        farthest = self._slack * float(self._expected.detach().abs().max())
        return int((~((found - expected).abs() <= farthest)).sum())  # so that NaN is wrong
