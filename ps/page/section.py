"""Section: one part of the page, and what of it has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from hubring.ps.page.kit.templating import Templates

TEMPLATES = Templates(__package__)
"""Of the page; every section has one, whose macros make the section and its rows."""

ROWS = "<!-- rows -->"
"""Stands in a section's markup where its rows go; no text can look like it, for text is escaped."""


@dataclass(frozen=True, slots=True)
class Section:
    """What is under one heading.

    Attributes:
        frame: One element, with `ROWS` in it if there are any.
        rows: Elements that change by themselves, by their ids.
    """

    frame: Markup
    rows: Mapping[str, Markup] = field(default_factory=dict)

    @property
    def html(self) -> Markup:
        rows = "".join(self.rows.values())
        return Markup(str(self.frame).replace(ROWS, rows))  # noqa: S704 - all of it is markup


def changes(before: Mapping[str, Section], after: Mapping[str, Section]) -> dict[str, Markup]:
    """The elements to put into the place of those with their ids; a row alone where its section stands.

    Args:
        before: Sections by their ids, as they were.
        after: As they are; the same ids.
    """
    changed: dict[str, Markup] = {}
    for name, section in after.items():
        old = before[name]
        if section.frame != old.frame or section.rows.keys() != old.rows.keys():
            changed[name] = section.html
        else:
            changed |= {row: html for row, html in section.rows.items() if html != old.rows[row]}
    return changed
