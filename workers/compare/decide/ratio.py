"""One number divided by another over the same seeds, and what that decides.

Four things keep a ratio from being decided: a doubt about the runs, fewer than `FEWEST` seeds, two runs of
the same row that differ as much (`MeasurementNoise.floor`), and chance among all comparisons (`holm`).

A report with twenty comparisons at 5 % each names a false winner in most reports. Holm's method keeps
that probability at 5 % for the whole report: the smallest probability of chance is compared with 5 % / n, the
next with 5 % / (n - 1), and so on until one fails (Holm, Scandinavian Journal of Statistics, 1979). So every
comparison that a sentence may use counts, whatever the other comparisons decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from statistics import NormalDist, fmean, stdev

from msgspec import Struct
from msgspec.structs import replace

from hubring.workers.compare.statistics import CONFIDENCE, quantile, tail

EVEN = 1.03
"""Two numbers closer than this ratio are not decided, whatever their interval."""
CHANCE = 1 - CONFIDENCE
"""The largest probability that any sentence of a report names a winner by chance."""
FEWEST = 3
"""Fewest seeds that decide anything."""
MOST_SEEDS = 50
"""If deciding takes more seeds than this, the rows count as equal in practice."""
POWER = 0.8
"""The least probability that as many seeds as a report names decide."""
UNSEEN = NormalDist().inv_cdf(0.9)
"""The spread of a few seeds is often smaller than the true one. The number of seeds is computed with a spread
that is larger than the true one in 90 % of cases, so that many seeds decide with `POWER` even after three."""


class Decision(Enum):
    """What a ratio decides."""

    LARGER = auto()
    SMALLER = auto()
    EVEN = auto()
    """The whole interval is close to 1."""
    DOUBTFUL = auto()
    """Other programs disturbed the runs, or the script changed between them."""
    FEW_SEEDS = auto()
    LIKE_REPEATS = auto()
    """Two runs of the same row differ as much."""
    AMONG_MANY = auto()
    """The interval excludes 1, but so can chance in one of so many comparisons."""
    OPEN = auto()
    """The interval is too wide, or the ratio too close to 1."""


class Ratio(Struct, frozen=True):
    """One number divided by another, paired by seed.

    Attributes:
        value: The geometric mean over the seeds.
        spread: Standard deviation of the logarithms; None with one seed.
        seeds: How many seeds have both numbers.
        level: The probability of chance at or below which it is decided. A report with many comparisons has a
            lower level for each.
        floor: The ratio of two runs of the same row. A ratio closer to 1 is not decided.
        doubt: Why nothing can be decided; empty if it can.
        among: How many comparisons the report makes.
    """

    value: float
    spread: float | None = None
    seeds: int = 1
    level: float = CHANCE
    floor: float = EVEN
    doubt: str = ""
    among: int = 1

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
    def decision(self) -> Decision:
        """What it decides."""
        if self.doubt:
            return Decision.DOUBTFUL
        if self.seeds < FEWEST:
            return Decision.FEW_SEEDS
        away, interval = max(self.value, 1 / self.value), self.interval
        if away >= self.least and self.chance <= self.level:
            return Decision.LARGER if self.value > 1 else Decision.SMALLER
        if interval is not None and 1 / EVEN < interval[0] <= interval[1] < EVEN:
            return Decision.EVEN
        if away >= self.least and self.chance <= CHANCE:
            return Decision.AMONG_MANY
        return Decision.LIKE_REPEATS if EVEN < away <= self.least else Decision.OPEN

    @property
    def decided(self) -> bool:
        """Whether it is larger or smaller than 1. A ratio can be neither decided nor even."""
        return self.decision in (Decision.LARGER, Decision.SMALLER)

    @property
    def least(self) -> float:
        """The smallest ratio that can be decided on this machine."""
        return max(EVEN, self.floor)

    @property
    def needed(self) -> int | None:
        """How many seeds decide it with `POWER` if the ratio is the true one; None: over `MOST_SEEDS`.

        The bound of the spread follows from the chi-square distribution (Wilson and Hilferty, PNAS 1931).
        """
        away, freedom = abs(math.log(self.value)), self.seeds - 1
        if self.spread is None or away <= math.log(self.least):
            return None
        part = 2 / (9 * freedom)
        spread = self.spread / (1 - part - UNSEEN * math.sqrt(part)) ** 1.5
        for seeds in range(self.seeds + 1, MOST_SEEDS + 1):
            error = spread / math.sqrt(seeds)
            least = max(math.log(self.least), quantile(self.level, seeds - 1) * error)
            if away >= least + NormalDist().inv_cdf(POWER) * error:
                return seeds
        return None

    @property
    def to_decide(self) -> str:
        """How many seeds would decide it, as the end of a sentence; empty if unknown."""
        return "" if self.needed is None else f"; {self.needed} seeds would decide it in 4 of 5 cases"

    @property
    def factor(self) -> str:
        """As text. It can differ from the ratio of the two medians."""
        return f"a factor of {self}" if self.spread is None else f"a factor of {self} when paired by seed"

    @property
    def inverse(self) -> Ratio:
        """The second number divided by the first."""
        return replace(self, value=1 / self.value)

    @property
    def range(self) -> str:
        """The interval as text, with a space before it; empty without one."""
        if self.interval is None:
            return ""
        low, high = (f"{each:.2f}" for each in self.interval)
        return "" if low == high else f" ({low} to {high})"

    def __str__(self) -> str:
        return f"{self.value:.2f}{self.range}"


def ratio(first: Sequence[float | None], second: Sequence[float | None]) -> Ratio | None:
    """Returns `first / second` for values of the same seeds; None if no seed has both above 0.

    Pairing removes what a seed does to both: an easy start, an unlucky order of the data.
    """
    pairs = zip(first, second, strict=True)
    logs = [math.log(a / b) for a, b in pairs if a is not None and b is not None and a > 0 and b > 0]
    if not logs:
        return None
    return Ratio(math.exp(fmean(logs)), stdev(logs) if len(logs) > 1 else None, len(logs))


def holm(chances: Iterable[float]) -> float:
    """Returns the probability of chance at or below which each of these comparisons is decided."""
    ordered = sorted(chances)
    threshold = CHANCE / max(1, len(ordered))
    for rank, chance in enumerate(ordered):
        step = CHANCE / (len(ordered) - rank)
        if chance > step:
            break
        threshold = step
    return threshold
