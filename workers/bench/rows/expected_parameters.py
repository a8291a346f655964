"""The gradients of the ranks, and the expected parameters.

The gradients are periodic: one period, stepped by torch's own optimizer with the mean, gives every element
of the model. The period is a prime, which divides no slice, bucket or page, so that a misplaced element is
detected. The gradients of two elements, or of two ranks, never differ only by a factor, and change in every
step. So the check detects a misplaced element, a lost rank and a lost step even with Adam, which ignores a
constant factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hubring.workers.bench.rows.model import optimizer_of

PERIOD = 1021
"""Number of elements after which gradients, and so parameters, repeat."""
_SCATTER = 389
"""Distance in value of neighbouring elements, so that neighbouring blocks rarely look alike."""
_TILE_PERIODS = 256
"""Parameters are compared in pieces that fit into the cache."""


class Truth:
    """Computes the expected parameters step by step.

    Args:
        optimizer: The job's optimizer.
        size: Number of ranks.
        slack: Largest allowed error, as a share of the largest parameter; 0: only rounding errors.
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
        """Writes this rank's gradients of the next step into flat tensors, like backward."""
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
        """Returns the number of wrong elements of flat parameters, in one or more copies of the model."""
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
        """Yields each tensor's start in the period; every copy of the model starts at 0."""
        place = 0
        for tensor in tensors:
            yield place % self._numel % PERIOD
            place += tensor.numel()

    def _wrong(self, found: Tensor, expected: Tensor) -> int:
        if torch.equal(found, expected):  # nearly always true, and ten times faster
            return 0
        if not self._slack:
            return int((~torch.isclose(found, expected, rtol=1e-5, atol=0.0)).sum())
        farthest = self._slack * float(self._expected.detach().abs().max())
        return int((~((found - expected).abs() <= farthest)).sum())  # negated so that NaN counts as wrong
