"""Ratio of one row's numbers to another's, and whether chance can explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from hubring.workers.compare.result.statistics import CONFIDENCE, quantile, tail

EVEN = 1.03
"""Two numbers closer than this ratio are not decided, whatever their interval."""
CHANCE = 1 - CONFIDENCE
"""The largest probability that any sentence of a report names a winner by chance."""
MOST_SEEDS = 50
"""If deciding takes more seeds than this, the rows count as equal in practice."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One number divided by another, paired by seed.

    Attributes:
        value: The geometric mean over the seeds.
        spread: Standard deviation of the logarithms; None with one seed.
        seeds: How many seeds have both numbers.
        level: The probability of chance at or below which it is decided. A report with many comparisons has a
            lower level for each.
        floor: The ratio of two runs of the same row. A ratio closer to 1 is not decided.
        doubt: Why nothing can be decided on this machine; empty if it can.
    """

    value: float
    spread: float | None = None
    seeds: int = 1
    level: float = CHANCE
    floor: float = EVEN
    doubt: str = ""

    @property
    def chance(self) -> float:
        """The probability that two equal rows differ by at least this ratio; 1 with one seed."""
        if self.spread is None:
            return 1.0
        error = self.spread / math.sqrt(self.seeds)
        away = abs(math.log(self.value))
        return tail(away / error if error else math.inf * (away > 0), self.seeds - 1) if away else 1.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval that holds the true ratio in 95 % of cases; None with one seed."""
        if self.spread is None:
            return None
        reach = math.exp(quantile(CHANCE, self.seeds - 1) * self.spread / math.sqrt(self.seeds))
        return self.value / reach, self.value * reach

    @property
    def decided(self) -> bool:
        """Whether it is larger or smaller than 1. A ratio can be neither decided nor even."""
        near = 1 / self.least < self.value < self.least
        return not (near or self.doubt) and self.chance <= self.level

    @property
    def least(self) -> float:
        """The smallest ratio that can be decided on this machine."""
        return max(EVEN, self.floor)

    @property
    def even(self) -> bool:
        """Whether the whole interval is close to 1; False with one seed."""
        interval = self.interval
        return not self.doubt and interval is not None and 1 / EVEN < interval[0] <= interval[1] < EVEN

    @property
    def like_repeats(self) -> bool:
        """Whether two runs of the same row differ as much on this machine, though it is not close to 1."""
        return EVEN < max(self.value, 1 / self.value) <= self.least

    @property
    def more(self) -> bool:
        """Whether it is decided and larger than 1."""
        return self.decided and self.value > 1

    @property
    def needed(self) -> int | None:
        """How many seeds would decide it if they vary as these do; None: over `MOST_SEEDS`, or unknown."""
        away = abs(math.log(self.value))
        if self.spread is None or away <= math.log(self.least):
            return None
        for seeds in range(self.seeds + 1, MOST_SEEDS + 1):
            if quantile(self.level, seeds - 1) * self.spread / math.sqrt(seeds) < away:
                return seeds
        return None

    @property
    def factor(self) -> str:
        """As text. It can differ from the ratio of the two medians."""
        return f"a factor of {self}" if self.spread is None else f"a factor of {self} when paired by seed"

    @property
    def inverse(self) -> Ratio:
        """The second number divided by the first."""
        return replace(self, value=1 / self.value)

    @property
    def once(self) -> str:
        """The value alone, as text."""
        return f"{self.value:.2f}"

    @property
    def range(self) -> str:
        """The interval as text, with a space before it; empty without one."""
        if self.interval is None:
            return ""
        low, high = (f"{each:.2f}" for each in self.interval)
        return "" if low == high else f" ({low} to {high})"

    def __str__(self) -> str:
        return f"{self.once}{self.range}"


def ratio(first: Sequence[float | None], second: Sequence[float | None]) -> Ratio | None:
    """Returns `first / second` for values of the same seeds; None if no seed has both above 0.

    Pairing removes what a seed does to both: an easy start, an unlucky order of the data.
    """
    pairs = zip(first, second, strict=True)
    logs = [math.log(a / b) for a, b in pairs if a is not None and b is not None and a > 0 and b > 0]
    if not logs:
        return None
    return Ratio(math.exp(fmean(logs)), stdev(logs) if len(logs) > 1 else None, len(logs))
