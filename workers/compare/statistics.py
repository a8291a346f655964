"""Statistics of a comparison: its numbers and how they are written, medians with intervals, and noise.

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
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from statistics import fmean, median, stdev
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.page.kit.figures import NOTHING, digits, size

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


@lru_cache(maxsize=1024)
def quantile(chance: float, freedom: int) -> float:
    """Returns the t of which `tail` is `chance`, between 0 and 1 (both excluded)."""
    low, high = 0.0, 1.0
    while tail(high, freedom) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > chance else (low, middle)
    return high


class Number(Struct, frozen=True):
    """A number over all seeds: `values` per seed, their median and its confidence interval."""

    values: list[float | None]
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float | None]) -> Number | None:
        """Returns the number of these values; None if no seed has a value."""
        known = [value for value in values if value is not None]
        return Number(list(values), *median_interval(known)) if known else None

    @property
    def complete(self) -> bool:
        """Whether every seed has a value."""
        return None not in self.values

    @property
    def seeds(self) -> int:
        """How many seeds have a value."""
        return sum(value is not None for value in self.values)

    @property
    def part(self) -> str:
        """How many seeds have a value, such as ` (2/3)`; empty if all have."""
        return "" if self.complete else f" ({self.seeds}/{len(self.values)})"

    @property
    def most(self) -> float:
        """The largest value of all seeds."""
        return max(value for value in self.values if value is not None)


class NumberFormat(Struct, frozen=True):
    """One of the numbers of `results.json`.

    Attributes:
        title: Its name in reports.
        unit: Written after a value; empty where the formatted value contains it.
        write: Formats a value.
        worst: The largest value of all runs counts, since a median would hide it.
        speed: It is withheld if a row computed something else than it should.
    """

    title: str
    unit: str = ""
    write: Callable[[float], str] = digits
    worst: bool = False
    speed: bool = False

    @property
    def head(self) -> str:
        """Head of a table column."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def interval(self, number: Number | None) -> str:
        """Returns the `span`, and ` (2/3)` if only 2 of 3 seeds have a value."""
        return NOTHING if number is None else f"{self.span(number)}{number.part}"

    def span(self, number: Number) -> str:
        """Returns `median (low–high)`; a single value if there is only one, or for `worst`."""
        if self.worst:
            return self.write(number.most)
        low, high = self.write(number.low), self.write(number.high)
        middle = self.write(number.median)
        return middle if low == high else f"{middle} ({low}–{high})"


_speed = partial(NumberFormat, speed=True)

NUMBERS = {
    "samples_per_second": _speed("throughput", "{samples}/s"),
    "step_ms": _speed("step", "ms"),
    "step_mean_ms": _speed("step, mean", "ms"),
    "seconds_to_target": _speed("to target", "s"),
    "samples_to_target": NumberFormat("to target", "{samples}"),
    "seconds": _speed("whole run", "s"),
    "final_loss": NumberFormat("final loss"),
    "final_metric": NumberFormat("{metric}", write=lambda value: digits(value, 4)),
    "bytes_sent_per_step": NumberFormat("sent a step", write=size),
    "bytes_received_per_step": NumberFormat("received a step", write=size),
    "compute_ms": _speed("compute", "ms"),
    "exposed_ms": _speed("exposed exchange", "ms"),
    "hidden_ms": _speed("hidden exchange", "ms"),
    "read_wait_ms": _speed("read wait", "ms"),
    "queue_ms": _speed("server queue", "ms"),
    "apply_ms": _speed("server apply", "ms"),
    "staleness_mean": NumberFormat("staleness, mean"),
    "staleness_max": NumberFormat("staleness, max over all seeds", write="{:g}".format, worst=True),
    "memory_mb": NumberFormat("memory", "MB"),
    "cpu_ms_per_step": _speed("CPU a step", "ms"),
    "record_ms": _speed("gate's record a step", "ms"),
    "pause_seconds": _speed("pause after the loss", "s"),
    "price_per_epoch": _speed("price of an epoch"),
    "price_to_target": _speed("price to target"),
    "lost_steps": NumberFormat("steps repeated after the loss"),
}
"""A row's numbers by their names in `results.json`; see `figures` for what is in braces."""

SPEEDS = tuple(name for name, each in NUMBERS.items() if each.speed)


def figures(samples: str, metric: str) -> dict[str, NumberFormat]:
    """Returns `NUMBERS` with a job's words.

    Args:
        samples: The job's word for its samples.
        metric: Title of the job's metric.
    """
    return {
        name: replace(each, title=each.title.format(metric=metric), unit=each.unit.format(samples=samples))
        for name, each in NUMBERS.items()
    }


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
        repeated: How many runs took the place of disturbed ones.
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
    repeated: int = 0
    said: list[str] = []
    gpus: bool = False

    @property
    def summary(self) -> str:
        """Whether anything disturbed the runs, in a sentence."""
        found = "Nothing disturbed the runs" if self.quiet else "Some runs were disturbed"
        unseen = ", as far as processors and memory show; GPUs were not watched" if self.gpus else ""
        again = f", {self.repeated} of which replaced disturbed ones" if self.repeated else ""
        return f"{found}{again}{unseen}."

    @property
    def floor(self) -> float:
        """The ratio by which equal rows differ here: the mean of the repeats, or two standard errors."""
        logs = [math.log(each) for each in self.repeat.ratios] if self.repeat else []
        error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        return math.exp(max(abs(fmean(logs)) if logs else 0.0, 2 * error))
