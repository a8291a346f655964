"""Medians with intervals from a few repeats, and the probability that a difference is chance.

A row's own numbers are skewed, so their intervals assume no distribution. An interval goes from
one of the ordered values to another. How often two of them enclose the median follows from coin tosses (David
and Nagaraja, Order Statistics, 2003, section 7.1). With three seeds the interval is their range;
`interval_words` states how often it contains the median.

Coin tosses cannot decide anything with fewer than six seeds. So two rows are compared by Student's t-test
on the logarithms of their ratios, one for each seed: what slows a run multiplies its time, so logarithms of
ratios are close to normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

CONFIDENCE = 0.95
"""Minimum probability that an interval contains the median, given enough seeds."""

ENOUGH = 6
"""Seeds from which on it does; with fewer the interval is the range."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its interval, in the unit of the values."""

    median: float
    low: float
    high: float


def interval_words(seeds: int) -> str:
    """Describes an interval over this many seeds: the end of a sentence.

    The range misses the median if all values are on one side of it. With fewer than `ENOUGH` seeds that
    happens too often for `CONFIDENCE`.
    """
    if seeds == 1:
        return "is the one seed's value"
    if seeds < ENOUGH:
        contained = f"{1 - 2 * 0.5**seeds:.0%}"
        return f"is the range of the {seeds} seeds, which contains the median in {contained} of cases"
    return f"is the interval that contains the median in at least {CONFIDENCE:.0%} of cases"


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


def tail(t: float, freedom: int) -> float:
    """Returns the probability that Student's t is further from 0 than `t`, on either side.

    Args:
        t: Any value; infinite: 0.
        freedom: Degrees of freedom, from 1.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 1964, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for step in range(freedom // 2):
        total += term
        term *= cosine**2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return min(1.0, max(0.0, 1 - within))


def quantile(chance: float, freedom: int) -> float:
    """Returns the t of which `tail` is `chance`, between 0 and 1 (both excluded)."""
    low, high = 0.0, 1.0
    while tail(high, freedom) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > chance else (low, middle)
    return high
