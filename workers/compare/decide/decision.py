"""What a report compares, and what each comparison decides. All are made before any text.

Three things keep a ratio from being decided: chance (`holm`), two runs of the same row that differ as much
(`MeasurementNoise.floor`), and runs that other programs disturbed (`RowResult.disturbed`).

A report with twenty comparisons at 5 % each names a false winner in most reports. Holm's method keeps
that probability at 5 % for the whole report: the smallest probability of chance is compared with 5 % / n, the
next with 5 % / (n - 1), and so on until one fails (Holm, Scandinavian Journal of Statistics, 1979). So every
comparison that a sentence may use counts, whatever the other comparisons decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import combinations
from statistics import fmean, stdev

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hubring.workers.compare.findings import Findings, RowResult
from hubring.workers.compare.plan.row import meets
from hubring.workers.compare.plan.setting import Setting, setting_words
from hubring.workers.compare.statistics import CONFIDENCE, SPEEDS, Number, quantile, tail

EVEN = 1.03
"""Two numbers closer than this ratio are not decided, whatever their interval."""
CHANCE = 1 - CONFIDENCE
"""The largest probability that any sentence of a report names a winner by chance."""
MOST_SEEDS = 50
"""If deciding takes more seeds than this, the rows count as equal in practice."""
SPEED = "samples_per_second"
"""The number that decides which of two rows is faster."""


class Decision(Enum):
    """What a ratio decides."""

    LARGER = auto()
    SMALLER = auto()
    EVEN = auto()
    """The whole interval is close to 1."""
    DISTURBED = auto()
    """Other programs disturbed the runs."""
    ONE_SEED = auto()
    LIKE_REPEATS = auto()
    """Two runs of the same row differ as much."""
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
    def decision(self) -> Decision:
        """What it decides."""
        if self.doubt:
            return Decision.DISTURBED
        if self.spread is None:
            return Decision.ONE_SEED
        away, interval = max(self.value, 1 / self.value), self.interval
        if away >= self.least and self.chance <= self.level:
            return Decision.LARGER if self.value > 1 else Decision.SMALLER
        if interval is not None and 1 / EVEN < interval[0] <= interval[1] < EVEN:
            return Decision.EVEN
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
        """How many seeds would decide it if they vary as these do; None: over `MOST_SEEDS`, or unknown."""
        away = abs(math.log(self.value))
        if self.spread is None or away <= math.log(self.least):
            return None
        for seeds in range(self.seeds + 1, MOST_SEEDS + 1):
            if quantile(self.level, seeds - 1) * self.spread / math.sqrt(seeds) < away:
                return seeds
        return None

    @property
    def to_decide(self) -> str:
        """How many seeds would decide it, as the end of a sentence; empty if unknown."""
        return "" if self.needed is None else f"; about {self.needed} seeds would decide it"

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


Comparison = tuple[str, tuple[str, str], tuple[str, str]]
"""A comparison: the number, and the settings and names of two rows in ascending order."""


def _place(row: RowResult) -> tuple[str, str]:
    return row.setting, row.row


class Comparisons:
    """All comparisons of a report. A text can read no other one.

    Args:
        findings: The findings.

    Attributes:
        findings: The findings.
        scopes: All settings with their rows.
        ratios: The first row's number divided by the second's; None: a row has no value.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        settings = findings.settings
        words = [setting_words(setting) for setting in settings]
        shared = set.intersection(*map(set, words))
        self.scopes = [
            SettingRows(
                self, setting, [word for word in mine if word not in shared] if len(words) > 1 else None
            )
            for setting, mine in zip(settings, words, strict=True)
        ]
        found: dict[Comparison, Ratio | None] = {}
        for number, *pair in self._wanted():
            first, second = sorted(pair, key=_place)
            found[number, _place(first), _place(second)] = self._ratio(number, first, second)
        level = holm(each.chance for each in found.values() if each)
        self.ratios = {key: each and replace(each, level=level) for key, each in found.items()}

    def ratio(self, number: str, first: RowResult, second: RowResult) -> Ratio | None:
        """Returns a number of one row divided by that of another; None if one has no value."""
        if _place(first) <= _place(second):
            return self.ratios[number, _place(first), _place(second)]
        found = self.ratios[number, _place(second), _place(first)]
        return found and found.inverse

    def _ratio(self, number: str, first: RowResult, second: RowResult) -> Ratio | None:
        one, other = first.number(number), second.number(number)
        found = ratio(one.values, other.values) if one and other else None
        if found is None or number not in SPEEDS:
            return found
        doubt = first.disturbed or second.disturbed or ""
        return replace(found, floor=self.findings.noise.floor, doubt=doubt)

    def _wanted(self) -> Iterator[tuple[str, RowResult, RowResult]]:
        """Yields every comparison that a sentence may use."""
        for scope in self.scopes:
            for number, first, second in scope.wanted():
                one, other = scope.row(first), scope.row(second)
                if one is not None and other is not None:
                    yield number, one, other
            for here, there in scope.delayed:
                yield SPEED, there, here


class SettingRows(Struct, frozen=True):
    """One setting with its rows.

    Attributes:
        compared: The comparisons of the report.
        setting: The setting.
        words: What differs from the other settings; None if there is no other setting.
    """

    compared: Comparisons
    setting: Setting
    words: Sequence[str] | None

    @property
    def findings(self) -> Findings:
        """The findings."""
        return self.compared.findings

    @property
    def rows(self) -> list[RowResult]:
        """The rows of the setting, in order."""
        return self.findings.under(self.setting.key)

    @property
    def names(self) -> list[str]:
        """Names of the rows."""
        return [row.row for row in self.rows]

    def number(self, row: str, name: str) -> Number | None:
        """Returns a number of a row; None if the row or the number does not exist."""
        found = self.row(row)
        return None if found is None else found.number(name)

    def row(self, name: str) -> RowResult | None:
        """Returns the row with that name; None if there is none."""
        return next((each for each in self.rows if each.row == name), None)

    def ratio(self, name: str, first: str, second: str) -> Ratio | None:
        """Returns a number of one row divided by that of another; None if one has no value."""
        one, other = self.row(first), self.row(second)
        return None if one is None or other is None else self.compared.ratio(name, one, other)

    @property
    def hubs(self) -> list[str]:
        """Hub rows with a speed that compute what a ring computes, the one that represents all first."""
        hubs = [name for name in self._racing if name.startswith("hub-")]
        return sorted(hubs, key=lambda name: name != chosen(hubs))

    @property
    def pair(self) -> tuple[str, str] | None:
        """Hub and ring, or else the first two rows that compute the same; None if there are no two.

        After a fault, a speed includes the time to detect it, so no rows are compared.
        """
        raced = sorted(self._racing, key=lambda name: name == "local")  # one process comes last
        if self.setting.fault is not None or len(raced) < 2:
            return None
        return (self.hubs[0], "ring") if self.hubs and "ring" in raced else (raced[0], raced[1])

    @property
    def hub_and_ring(self) -> bool:
        """Whether the pair is a hub and the ring."""
        return bool(self.hubs) and self.pair == (self.hubs[0], "ring")

    @property
    def _racing(self) -> list[str]:
        """The rows with a speed that should compute the same, so that speed alone decides."""
        return [row.row for row in self.rows if row.synchronous and row.exact and row.number(SPEED)]

    @property
    def parallel(self) -> list[str]:
        """Rows to compare with one process."""
        several = self.setting.workers > 1 and self.setting.fault is None
        return [name for name in self.names if name != "local"] if several else []

    @property
    def asynchronous(self) -> list[tuple[str, str]]:
        """Rows that compute something else, each with the row to compare it with."""
        base = next((name for name in ("hub-bsp", "ring", "hub-aggregate") if name in self.parallel), None)
        if base is None or not self.number(base, SPEED):
            return []
        others = (row for row in self.rows if not (row.synchronous and row.exact))
        return [(row.row, base) for row in others if row.number(SPEED)]

    @property
    def times(self) -> dict[str, Number]:
        """Seconds to the target, of the rows that reach it with every seed."""
        found = {row.row: row.number("seconds_to_target") for row in self.rows}
        return {name: time for name, time in found.items() if time is not None and time.complete}

    @property
    def delayed(self) -> list[tuple[RowResult, RowResult]]:
        """Rows that the straggler slows, each with itself in the setting without a straggler."""
        if self.setting.straggler is None:
            return []
        wanted = msgspec.structs.replace(self.setting, straggler=None)
        calm = next((other for other in self.compared.scopes if other.setting == wanted), None)
        rows = [row for row in self.rows if meets(row.row, self.setting).straggler]
        return [(row, there) for row in rows if calm and (there := calm.row(row.row)) is not None]

    def wanted(self) -> Iterator[tuple[str, str, str]]:
        """Yields a number and two rows for every comparison within the setting."""
        if self.pair is not None:
            yield SPEED, *self.pair
            yield from ((SPEED, "local", name) for name in self.pair if name != "local")
        if self.hub_and_ring:
            yield "exposed_ms", self.hubs[0], "ring"
            yield from ((SPEED, name, self.hubs[0]) for name in self.hubs[1:])
        yield from ((SPEED, name, "local") for name in self.parallel)
        for name, base in self.asynchronous:
            yield SPEED, name, base
            if (name in self.times) == (base in self.times):
                yield "final_metric", name, base
        yield from (("seconds_to_target", one, other) for one, other in combinations(self.times, 2))

    def say(self, sentence: str, besides: str = "") -> str:
        """Returns the sentence with the setting in front.

        Args:
            sentence: Begins in lower case.
            besides: A word of the setting that the sentence itself contains.
        """
        where = None if self.words is None else [word for word in self.words if word != besides]
        if where:
            return f"With {', '.join(where)}: {sentence}"
        if where is not None and not besides:
            return f"In the base setting: {sentence}"
        if sentence.split()[0].strip(",") in self.names:  # the name of a row is not capitalized
            return sentence
        return f"{sentence[0].upper()}{sentence[1:]}"


def chosen(rows: Sequence[str]) -> str:
    """Returns the row that represents all: hub-bsp, or the first of the experiment.

    Not the fastest row: choosing by the numbers would bias the comparison.
    """
    return "hub-bsp" if "hub-bsp" in rows else rows[0]
