"""What a few repeats allow to say: medians with intervals.

Repeats are few and their times are skewed, so nothing is assumed of their distribution: the intervals go from
one of the ordered values to another, and how often these have the median between them is that of a tossed
coin's heads (David and Nagaraja, Order Statistics, 2003, section 7.1). They are honest about what three seeds
can tell: the interval is then the range of the three, and says how often that holds the median
(`interval_words`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

CONFIDENCE = 0.95
"""How often an interval holds the median, at least, where the seeds are enough for that."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and between what it may lie; in the unit of the values."""

    median: float
    low: float
    high: float


def interval_words(seeds: int) -> str:
    """What an interval over so many seeds is: the end of a sentence about it.

    The range misses the median where all values lie on one side of it, up to five too often for `CONFIDENCE`.
    """
    if seeds == 1:
        return "is the one seed's value"
    if seeds < 6:
        held = f"{1 - 2 * 0.5**seeds:.0%}"
        return f"is the range of the {seeds} seeds, which holds the median in {held} of cases"
    return f"is the interval that holds the median in at least {CONFIDENCE:.0%} of cases"


def by_chance(seeds: int) -> str:
    """What so few seeds cannot tell, as a sentence; empty where they are enough."""
    if seeds == 1:
        return "Everything ran with one seed, so nothing here tells chance from difference."
    if seeds < 6:
        odds = f"{2 * 0.5**seeds:.0%}"
        return f"With {seeds} seeds, two equal rows come out in the same order every time in {odds} of cases."
    return ""


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median with its interval: from one of the values to the one that is as far from the other end.

    Args:
        values: One a repeat, in any order: the order changes nothing. One value is its own interval.
        confidence: How often such an interval holds the true median at least, above 0 and below 1; of too
            few values for that it is the range.

    Raises:
        ValueError: There is no value, one is not finite, or the confidence is out of range.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"a median of {list(values)}: give at least one value, and only finite ones")
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence of {confidence:g}: it lies above 0 and below 1")
    ordered = sorted(map(float, values))
    outside = _outside(len(ordered), confidence)
    return Interval(median(ordered), ordered[outside], ordered[-1 - outside])


def _outside(count: int, confidence: float) -> int:
    """How many of so many ordered values lie outside of the interval, at either end.

    Each value is above the true median as a coin shows heads; with no more heads than lie outside, the
    interval misses it, and likewise with tails.
    """
    misses = accumulate(2 * math.comb(count, heads) / (1 << count) for heads in range((count + 1) // 2))
    return max(0, sum(chance <= 1 - confidence for chance in misses) - 1)
