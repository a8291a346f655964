"""Input of all sections of the page."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hubring.workers.compare.figures import Figure, figures
from hubring.workers.compare.page.figure import Label
from hubring.workers.compare.page.mark import Mark, marks
from hubring.workers.compare.page.panel import Panel, panels
from hubring.workers.compare.result.findings import Entry, Findings
from hubring.workers.compare.result.goal import Goal
from hubring.workers.compare.result.setting_text import emulation, name


@dataclass(frozen=True, slots=True)
class Material:
    """The findings, and the names and marks of their rows."""

    findings: Findings
    goal: Goal
    figures: Mapping[str, Figure]
    marks: Mapping[str, Mark]
    panels: Sequence[Panel]

    @staticmethod
    def of(findings: Findings) -> Material:
        """Returns the material for a page of these findings."""
        goal = Goal.of(findings)
        named = figures(goal.samples, goal.title)
        return Material(findings, goal, named, marks(findings.row_names), panels(findings))

    def name(self, entry: Entry) -> str:
        """Returns a row's name as text, with what it emulates."""
        return name(entry, self.findings)

    def label(self, entry: Entry) -> Label:
        """Returns a row's name, with what it emulates as a separate text."""
        return Label(entry.row, emulation(entry, self.findings.setting(entry.setting)))

    def name_under(self, row: str, settings: Container[str] | None = None) -> str:
        """Returns a row's name in these or all settings, with what it emulates in all or some of them."""
        mine = [each for each in self.findings.rows if each.row == row]
        mine = [each for each in mine if settings is None or each.setting in settings]
        names = list(dict.fromkeys(map(self.name, mine)))
        if len(names) > 1:
            return f"{row} (emulated in part)"
        return names[0] if names else row

    def key(self, rows: Iterable[str], settings: Container[str] | None = None) -> list[tuple[Mark, str]]:
        """Returns the meaning of these rows' marks."""
        return [(self.marks[row], self.name_under(row, settings)) for row in dict.fromkeys(rows)]
