"""By how much one row's numbers are another's, and whether that can be chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hubring.workers.compare.result.statistics import median_interval

EVEN = 1.03
"""Two numbers closer than this ratio are not told apart whatever their interval."""
EVEN_ONCE = 1.05
"""The same where there is one seed, and so no interval."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One number by another, paired by seed.

    Attributes:
        value: The median.
        low: From where it may lie; None with one seed.
        high: Up to where.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def decided(self) -> bool:
        """Whether it is shown to be larger or smaller than 1; neither that nor even: not told apart."""
        least = EVEN_ONCE if self.low is None else EVEN
        if 1 / least < self.value < least:
            return False
        return self.low is None or self.high is None or not self.low <= 1 <= self.high

    @property
    def even(self) -> bool:
        """Whether all that it may be is nearly 1. With one seed nobody knows."""
        return self.low is not None and self.high is not None and 1 / EVEN < self.low <= self.high < EVEN

    @property
    def more(self) -> bool:
        """Whether it is shown to be larger than 1."""
        return self.decided and self.value > 1

    @property
    def factor(self) -> str:
        """In words. Of several seeds it need not be what the two medians make, and says so."""
        return f"a factor of {self}" if self.low is None else f"seed by seed a factor of {self}"

    def __str__(self) -> str:
        value, low, high = (
            None if each is None else f"{each:.2f}" for each in (self.value, self.low, self.high)
        )
        return str(value) if low is None or low == high else f"{value} ({low} to {high})"


def ratio(first: Sequence[float | None], second: Sequence[float | None]) -> Ratio | None:
    """`first / second`, values of the same seeds; None where no seed has both above 0.

    Pairing takes out what a seed does to both alike: an easy start, an unlucky order of the data.
    """
    pairs = zip(first, second, strict=True)
    both = [a / b for a, b in pairs if a is not None and b is not None and a > 0 and b > 0]
    if len(both) < 2:  # one pair says nothing about chance
        return Ratio(*both) if both else None
    interval = median_interval(both)
    return Ratio(interval.median, interval.low, interval.high)
