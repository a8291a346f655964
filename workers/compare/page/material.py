"""What every section of the page is made from."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hubring.ps.markup import Html, element, together
from hubring.workers.compare.circumstance import emulation, name
from hubring.workers.compare.figures import Figure, figures
from hubring.workers.compare.findings import Entry, Findings
from hubring.workers.compare.goal import Goal
from hubring.workers.compare.page.mark import Mark, key, marks
from hubring.workers.compare.page.panel import Panel, panels

IN_SIGHT = 2
"""How many settings a section shows before the others are folded away."""


@dataclass(frozen=True, slots=True)
class Material:
    """The findings, and how their rows are called and drawn everywhere on the page."""

    findings: Findings
    goal: Goal
    figures: Mapping[str, Figure]
    marks: Mapping[str, Mark]
    panels: Sequence[Panel]

    @staticmethod
    def of(findings: Findings) -> Material:
        """What a page of these findings is made from."""
        goal = Goal.of(findings)
        named = figures(goal.samples, goal.title)
        return Material(findings, goal, named, marks(findings.row_names), panels(findings))

    def name(self, entry: Entry) -> str:
        """A row's name as plain text, with what is emulated of it."""
        return name(entry, self.findings)

    def label(self, entry: Entry) -> Html:
        """A row's name as markup, with what is emulated of it."""
        slept = emulation(entry, self.findings.setting(entry.setting))
        return together(
            element("b", entry.row), element("small", f" {slept}", class_="slept") if slept else ""
        )

    def name_under(self, row: str, settings: Container[str] | None = None) -> str:
        """A row's name over these settings, or over all, with what is emulated in all or in some."""
        mine = [each for each in self.findings.rows if each.row == row]
        mine = [each for each in mine if settings is None or each.setting in settings]
        names = list(dict.fromkeys(map(self.name, mine)))
        if len(names) > 1:
            return f"{row} (emulated in part)"
        return names[0] if names else row

    def key(self, rows: Iterable[str], settings: Container[str] | None = None) -> Html:
        """What the marks of these rows mean."""
        return key((self.marks[row], self.name_under(row, settings)) for row in dict.fromkeys(rows))


def section(name: str, title: str, lead: str | Html, *parts: Html | None) -> Html:
    """One part of the page, with the sentences that say what to look for."""
    head = element("h2", title, id=f"{name}-head")
    return element("section", head, element("p", lead), *parts, id=name, aria_labelledby=f"{name}-head")


def folded(found: Sequence[Html], what: str) -> Html:
    """The first few, and the others behind a line that opens."""
    seen, rest = found[:IN_SIGHT], found[IN_SIGHT:]
    more = element("summary", f"{len(rest)} more {what}{'s' if len(rest) > 1 else ''}")
    return together(*seen, element("details", more, *rest, class_="more") if rest else None)
