"""Statistics of a comparison: names of its numbers, medians with intervals, and noise.

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
from itertools import accumulate
from statistics import fmean, median, stdev
from typing import NamedTuple

from msgspec import Struct

CONFIDENCE = 0.95
"""Minimum probability that an interval contains the median, given enough seeds."""

ENOUGH = 6
"""Seeds from which on it does; with fewer the interval is the range."""


class Interval(NamedTuple):
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


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median and an interval between two values at the same distance from both ends.

    It contains the true median with a probability of `CONFIDENCE`; of too few values it is the range.

    Args:
        values: One per repeat, in any order. A single value is its own interval.

    Raises:
        ValueError: There is no value, or one is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"median of {list(values)}: expected at least one value, all of them finite")
    ordered, count = sorted(map(float, values)), len(values)
    # Each value is above the true median with probability 1/2, like heads of a coin. An interval misses the
    # median if there are no more heads, or no more tails, than values outside of it at either end.
    misses = accumulate(2 * math.comb(count, heads) / (1 << count) for heads in range((count + 1) // 2))
    outside = max(0, sum(chance <= 1 - CONFIDENCE for chance in misses) - 1)
    return Interval(median(ordered), ordered[outside], ordered[-1 - outside])


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


SPEEDS = (
    "samples_per_second",
    "step_ms",
    "step_mean_ms",
    "seconds_to_target",
    "seconds",
    "compute_ms",
    "exposed_ms",
    "hidden_ms",
    "read_wait_ms",
    "queue_ms",
    "apply_ms",
    "cpu_ms_per_step",
    "record_ms",
    "pause_seconds",
    "price_per_epoch",
    "price_to_target",
)
"""Numbers that are withheld if a row computed something else than it should."""

NUMBER_NAMES = (
    *SPEEDS,
    "samples_to_target",
    "lost_steps",
    "final_loss",
    "final_metric",
    "bytes_sent_per_step",
    "bytes_received_per_step",
    "staleness_mean",
    "staleness_max",
    "memory_mb",
)

LARGEST_COUNTS = ("staleness_max",)
"""Numbers for which the largest value of all runs counts; a median would hide it."""


class Load(Struct, frozen=True):
    """Median and maximum of a load of the machine, over all runs."""

    median: float | None = None
    max: float | None = None


class Repeat(Struct, frozen=True):
    """The row that ran twice with each seed; `ratios` are the second runs' speeds by the first runs'."""

    setting: str
    row: str
    ratios: list[float]


class MeasurementNoise(Struct, frozen=True):
    """Noise of the measurements.

    Attributes:
        load: The 1-minute load.
        foreign: Share of the machine that other programs used.
        stolen: Share of the machine that its hypervisor gave to other machines.
        stalled: Share of the time in which a program waited for memory.
        spread: Range of each row's step times over the seeds, relative to their median.
        repeat: The row that ran twice; None if it did not finish.
        quiet: No run was disturbed.
        said: What disturbed runs, in sentences.
        gpus: Whether runs used GPUs. Nothing tells what disturbs these.
    """

    load: Load = Load()
    foreign: Load | None = None
    stolen: Load | None = None
    stalled: Load | None = None
    spread: dict[str, float | None] = {}
    repeat: Repeat | None = None
    quiet: bool = True
    said: list[str] = []
    gpus: bool = False

    @property
    def summary(self) -> str:
        """Whether anything disturbed the runs, in a sentence."""
        found = "Nothing disturbed the runs" if self.quiet else "Some runs were disturbed"
        unseen = ", as far as processors and memory show; GPUs were not watched" if self.gpus else ""
        return f"{found}{unseen}."

    @property
    def floor(self) -> float:
        """The ratio by which equal rows differ here: the mean of the repeats, or two standard errors."""
        logs = [math.log(each) for each in self.repeat.ratios] if self.repeat else []
        error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        return math.exp(max(abs(fmean(logs)) if logs else 0.0, 2 * error))
