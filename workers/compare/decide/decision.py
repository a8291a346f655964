"""What a report compares. All comparisons are made before any text.

A report decides nothing about runs that other programs disturbed (`RowResult.disturbed`), or if the script
changed between runs. A row that failed is compared with no other row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hubring.workers.compare.decide.ratio import Ratio, holm, ratio
from hubring.workers.compare.findings import Findings, RowResult
from hubring.workers.compare.plan.row import meets
from hubring.workers.compare.plan.setting import Setting, setting_words
from hubring.workers.compare.statistics import SPEEDS, Number

SPEED = "samples_per_second"
"""The number that decides which of two rows is faster."""

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
        known = [each.chance for each in found.values() if each]
        more = {"level": holm(known), "among": len(known)}
        self.ratios = {key: each and replace(each, **more) for key, each in found.items()}

    def ratio(self, number: str, first: RowResult, second: RowResult) -> Ratio | None:
        """Returns a number of one row divided by that of another; None if one has no value."""
        if _place(first) <= _place(second):
            return self.ratios[number, _place(first), _place(second)]
        found = self.ratios[number, _place(second), _place(first)]
        return found and found.inverse

    def _ratio(self, number: str, first: RowResult, second: RowResult) -> Ratio | None:
        one, other = first.number(number), second.number(number)
        found = ratio(one.values, other.values) if one and other else None
        if found is None or not (sound(first) and sound(second)):
            return None
        upset = (first.disturbed or second.disturbed or "") if number in SPEEDS else ""
        floor = self.findings.noise.floor if number in SPEEDS else found.floor
        return replace(found, floor=floor, doubt=script_changes(self.findings) or upset)

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
    def sound(self) -> list[RowResult]:
        """The rows that are compared; a row that failed beats no other, and no other beats it."""
        return [row for row in self.rows if sound(row)]

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
        return [row.row for row in self.sound if row.synchronous and row.exact and row.number(SPEED)]

    @property
    def parallel(self) -> list[str]:
        """Rows to compare with one process."""
        several = self.setting.workers > 1 and self.setting.fault is None
        return [row.row for row in self.sound if row.row != "local"] if several else []

    @property
    def asynchronous(self) -> list[tuple[str, str]]:
        """Rows that compute something else, each with the row to compare it with."""
        base = next((name for name in ("hub-bsp", "ring", "hub-aggregate") if name in self.parallel), None)
        if base is None or not self.number(base, SPEED):
            return []
        others = (row for row in self.sound if not (row.synchronous and row.exact))
        return [(row.row, base) for row in others if row.number(SPEED)]

    @property
    def times(self) -> dict[str, Number]:
        """Seconds to the target, of the rows that reach it with every seed."""
        found = {row.row: row.number("seconds_to_target") for row in self.sound}
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

    def where(self, besides: str = "") -> str:
        """Returns what differs from the other settings, except for a word; empty if nothing does."""
        words = [word for word in self.words or () if word != besides]
        base = "" if self.words is None or besides else "in the base setting"
        return f"with {', '.join(words)}" if words else base

    def say(self, sentence: str, besides: str = "") -> str:
        """Returns the sentence with the setting in front.

        Args:
            sentence: Begins in lower case.
            besides: A word of the setting that the sentence itself contains.
        """
        if where := self.where(besides):
            return f"{where[0].upper()}{where[1:]}: {sentence}"
        if sentence.split()[0].strip(",") in self.names:  # the name of a row is not capitalized
            return sentence
        return f"{sentence[0].upper()}{sentence[1:]}"


def sound(row: RowResult) -> bool:
    """Whether a row is compared with others: no run failed, or only by a crash, so that the others count."""
    return row.failed is None or row.partly


def script_changes(findings: Findings) -> str:
    """Returns which runs used different versions of the user's script, as a clause; empty if none did."""
    runs: dict[str, str] = {}
    for label, digest in findings.scripts.items():
        runs.setdefault(digest, label)
    if len(runs) < 2:
        return ""
    one, other, *_ = runs.values()
    return f"{findings.job.name} changed between runs: {one} and {other} ran different versions of it"


def lost(findings: Findings) -> dict[str, str]:
    """Returns the rows of which runs failed, and why, except after a fault that the experiment asked for."""
    return {
        each.row: f"{each.row} failed in {each.failed}"
        for each in findings.rows
        if each.failed and meets(each.row, findings.setting(each.setting)).fault is None
    }


def chosen(rows: Sequence[str]) -> str:
    """Returns the row that represents all: hub-bsp, or the first of the experiment.

    Not the fastest row: choosing by the numbers would bias the comparison.
    """
    return "hub-bsp" if "hub-bsp" in rows else rows[0]
