"""The comparisons of one report: each says only what this machine and this many comparisons can show.

Three things keep a ratio from being decided: chance (`family`), two runs of the same row that
differ as much (`Noise.floor`), and runs that other programs disturbed (`Entry.disturbed`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hubring.workers.compare.result.family import Family
from hubring.workers.compare.result.findings import Entry, Findings
from hubring.workers.compare.result.numbers import SPEEDS
from hubring.workers.compare.result.ratio import Ratio, ratio


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Compares rows of the findings.

    Attributes:
        findings: The findings.
        family: All comparisons of the report.
    """

    findings: Findings
    family: Family = field(default_factory=Family)

    def ratio(self, name: str, first: Entry, second: Entry) -> Ratio | None:
        """Returns a number of one row divided by that of another; None if one has no value."""
        one, other = first.number(name), second.number(name)
        if one is None or other is None or (found := ratio(one.values, other.values)) is None:
            return None
        rows = frozenset({(first.setting, first.row), (second.setting, second.row)})
        level = self.family.level((name, rows), found.chance)
        if name not in SPEEDS:
            return replace(found, level=level)
        doubt = first.disturbed or second.disturbed or ""
        return replace(found, level=level, floor=self.findings.noise.floor, doubt=doubt)
