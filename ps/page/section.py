"""Section: one part of the page, and what of it has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hubring.ps.markup import Html

ROWS = Html("<!-- rows -->")
"""Stands in a section's markup where its rows go; no text can look like it, for text is escaped."""


@dataclass(frozen=True, slots=True)
class Section:
    """What is under one heading.

    Attributes:
        frame: One element, with `ROWS` in it if there are any.
        rows: Elements that change by themselves, by their ids.
    """

    frame: Html
    rows: Mapping[str, Html] = field(default_factory=dict)

    @property
    def html(self) -> Html:
        return Html(self.frame.replace(ROWS, "".join(self.rows.values())))


def changes(before: Mapping[str, Section], after: Mapping[str, Section]) -> dict[str, Html]:
    """The elements to put into the place of those with their ids; a row alone where its section stands.

    Args:
        before: Sections by their ids, as they were.
        after: As they are; the same ids.
    """
    changed: dict[str, Html] = {}
    for name, section in after.items():
        old = before[name]
        if section.frame != old.frame or section.rows.keys() != old.rows.keys():
            changed[name] = section.html
        else:
            changed |= {row: html for row, html in section.rows.items() if html != old.rows[row]}
    return changed
