"""Section: one part of the page, and the changes between two versions of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from hubring.ps.page.kit.templating import Templates

TEMPLATES = Templates(__package__)
"""The page's templates. Every section has one, with macros for the section and its rows."""

ROWS = "<!-- rows -->"
"""Marks the place of the rows in a section's markup. Text cannot contain it, because text is escaped."""


@dataclass(frozen=True, slots=True)
class Section:
    """The content under one heading.

    Attributes:
        frame: One element, which contains `ROWS` if the section has rows.
        rows: Elements that can be replaced separately, by id.
    """

    frame: Markup
    rows: Mapping[str, Markup] = field(default_factory=dict)

    @property
    def html(self) -> Markup:
        rows = "".join(self.rows.values())
        return Markup(str(self.frame).replace(ROWS, rows))  # noqa: S704 - all of it is markup


def changes(before: Mapping[str, Section], after: Mapping[str, Section]) -> dict[str, Markup]:
    """Returns the changed elements by id: single rows where possible, otherwise whole sections.

    Args:
        before: The old sections, by id.
        after: The new sections, with the same ids.
    """
    changed: dict[str, Markup] = {}
    for name, section in after.items():
        old = before[name]
        if section.frame != old.frame or section.rows.keys() != old.rows.keys():
            changed[name] = section.html
        else:
            changed |= {row: html for row, html in section.rows.items() if html != old.rows[row]}
    return changed
