"""What every section of the page is made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workers.compare.figures import Figure, figures
from workers.compare.findings import Entry, Findings
from workers.compare.goal import Goal
from workers.compare.page.element import Html, element, together
from workers.compare.page.mark import Mark, key, marks
from workers.compare.page.setting import Panel, emulation, name, panels

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
        goal = Goal.of(findings.experiment)
        named = figures(goal.samples, goal.title)
        return Material(findings, goal, named, marks(findings.row_names), panels(findings))

    def name(self, entry: Entry) -> str:
        """A row's name as plain text, with what is emulated of it."""
        return name(entry, self.findings)

    def label(self, entry: Entry) -> Html:
        """A row's name as markup, with what is emulated of it."""
        slept = emulation(entry, self.findings.setting(entry.setting))
        return together(element("b", entry.row), element("small", f" {slept}", class_="slept") if slept else "")

    def bare_name(self, row: str) -> str:
        """The name of a row seen over several settings, with what is emulated in any of them."""
        slept = [each for each in self.findings.rows if each.row == row and each.emulated]
        return self.name(slept[0]) if slept else row

    def key(self, rows: Iterable[str]) -> Html:
        """What the marks of these rows mean."""
        return key((self.marks[row], self.bare_name(row)) for row in dict.fromkeys(rows))


def section(name: str, title: str, lead: str | Html, *parts: Html | None) -> Html:
    """One part of the page, with the sentences that say what to look for."""
    head = element("h2", title, id=f"{name}-head")
    return element("section", head, element("p", lead), *parts, id=name, aria_labelledby=f"{name}-head")


def folded(found: Sequence[Html], what: str) -> Html:
    """The first few, and the others behind a line that opens."""
    seen, rest = found[:IN_SIGHT], found[IN_SIGHT:]
    more = element("summary", f"{len(rest)} more {what}")
    return together(*seen, element("details", more, *rest, class_="more") if rest else None)
