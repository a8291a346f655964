"""Ratio of one row's numbers to another's, and whether chance can explain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hubring.workers.compare.result.statistics import median_interval

EVEN = 1.03
"""Two numbers closer than this ratio are not decided, whatever their interval."""
EVEN_ONCE = 1.05
"""The same with one seed, which has no interval."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One number divided by another, paired by seed.

    Attributes:
        value: The median.
        low: Lower end of the interval; None with one seed.
        high: Upper end of the interval; None with one seed.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def decided(self) -> bool:
        """Whether it is larger or smaller than 1. A ratio can be neither decided nor even."""
        least = EVEN_ONCE if self.low is None else EVEN
        if 1 / least < self.value < least:
            return False
        return self.low is None or self.high is None or not self.low <= 1 <= self.high

    @property
    def even(self) -> bool:
        """Whether the whole interval is close to 1; False with one seed."""
        return self.low is not None and self.high is not None and 1 / EVEN < self.low <= self.high < EVEN

    @property
    def more(self) -> bool:
        """Whether it is decided and larger than 1."""
        return self.decided and self.value > 1

    @property
    def factor(self) -> str:
        """As text. With several seeds it can differ from the ratio of the two medians."""
        return f"a factor of {self}" if self.low is None else f"a factor of {self} when paired by seed"

    def __str__(self) -> str:
        value, low, high = (
            None if each is None else f"{each:.2f}" for each in (self.value, self.low, self.high)
        )
        return str(value) if low is None or low == high else f"{value} ({low} to {high})"


def ratio(first: Sequence[float | None], second: Sequence[float | None]) -> Ratio | None:
    """Returns `first / second` for values of the same seeds; None if no seed has both above 0.

    Pairing removes what a seed does to both: an easy start, an unlucky order of the data.
    """
    pairs = zip(first, second, strict=True)
    both = [a / b for a, b in pairs if a is not None and b is not None and a > 0 and b > 0]
    if len(both) < 2:  # one pair gives no interval
        return Ratio(*both) if both else None
    interval = median_interval(both)
    return Ratio(interval.median, interval.low, interval.high)
