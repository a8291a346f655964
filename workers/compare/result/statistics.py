"""Medians with intervals from a few repeats.

Repeats are few and their times are skewed, so the intervals assume no distribution. An interval goes from
one of the ordered values to another. How often two of them enclose the median follows from coin tosses (David
and Nagaraja, Order Statistics, 2003, section 7.1). With three seeds the interval is their range;
`interval_words` states how often it contains the median.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

CONFIDENCE = 0.95
"""Minimum probability that an interval contains the median, given enough seeds."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its interval, in the unit of the values."""

    median: float
    low: float
    high: float


def interval_words(seeds: int) -> str:
    """Describes an interval over this many seeds: the end of a sentence.

    The range misses the median if all values are on one side of it. With up to five seeds that happens too
    often for `CONFIDENCE`.
    """
    if seeds == 1:
        return "is the one seed's value"
    if seeds < 6:
        contained = f"{1 - 2 * 0.5**seeds:.0%}"
        return f"is the range of the {seeds} seeds, which contains the median in {contained} of cases"
    return f"is the interval that contains the median in at least {CONFIDENCE:.0%} of cases"


def by_chance(seeds: int) -> str:
    """Returns a warning about too few seeds; empty if they are enough."""
    if seeds == 1:
        return "Everything ran with one seed, so any difference can be chance."
    if seeds < 6:
        odds = f"{2 * 0.5**seeds:.0%}"
        return (
            f"With {seeds} seeds, chance alone makes one of two equal rows faster with every seed in {odds}"
            " of cases."
        )
    return ""


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Returns the median and an interval between two values at the same distance from both ends.

    Args:
        values: One per repeat, in any order. A single value is its own interval.
        confidence: Minimum probability that such an interval contains the true median, above 0 and below 1.
            With too few values the interval is the range.

    Raises:
        ValueError: There is no value, one is not finite, or the confidence is out of range.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"median of {list(values)}: expected at least one value, all of them finite")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence:g}: expected a number above 0 and below 1")
    ordered = sorted(map(float, values))
    outside = _outside(len(ordered), confidence)
    return Interval(median(ordered), ordered[outside], ordered[-1 - outside])


def _outside(count: int, confidence: float) -> int:
    """Returns how many of `count` ordered values are outside of the interval at either end.

    Each value is above the true median with probability 1/2, like heads of a coin. The interval misses the
    median if there are no more heads, or no more tails, than values outside.
    """
    misses = accumulate(2 * math.comb(count, heads) / (1 << count) for heads in range((count + 1) // 2))
    return max(0, sum(chance <= 1 - confidence for chance in misses) - 1)
