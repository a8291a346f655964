"""Tables, and the headings above what they stand beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from hubring.ps.markup import Child, Html, element
from hubring.ps.page.section import ROWS


def headed(name: str, heading: str, *parts: Html | None) -> Html:
    """A section of the page under its heading.

    Args:
        name: The section's id.
        heading: What it is called.
        parts: What stands under it.
    """
    title = element("h2", heading, id=f"{name}-title")
    return element("section", title, *parts, id=name, aria_labelledby=f"{name}-title")


def table(name: str, caption: str, heads: Sequence[str], rows: Iterable[Html] = (ROWS,)) -> Html:
    """A table in a box of its own that can be scrolled, also from the keyboard.

    Args:
        name: Id of the box.
        caption: What the table holds.
        heads: Of its columns; the first names the row.
        rows: From `row`; where they change by themselves, they come with the section.
    """
    head = element("thead", element("tr", *(element("th", each, scope="col") for each in heads)))
    inner = element("table", element("caption", caption), head, element("tbody", *rows))
    return element("div", inner, id=name, class_="scroll", role="region", aria_label=caption, tabindex=0)


def row(first: Child, *cells: Child, name: str | None = None, kind: str | None = None) -> Html:
    """One row: what it is about, then its cells."""
    return element("tr", _head(first), *map(_cell, cells), id=name, class_=kind)


# Of 64 rows most say what others say, or what they said a second ago.


@lru_cache(maxsize=512, typed=True)
def _head(child: Child) -> Html:
    return element("th", child, scope="row")


@lru_cache(maxsize=1024, typed=True)
def _cell(child: Child) -> Html:
    return element("td", child)
