"""Charts: what every drawing has: a title, a sentence that says what it shows, axes, a key, its numbers.

A drawing fills whatever width there is and keeps its text at one size: x is a share of the width, y of
a fixed height, and labels lie in the margins, which are the SVG's padding. Lines, which SVG cannot draw in
shares, are in an inner SVG of 1000 by 1000 that is stretched while their pens are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hubring.ps.markup import Html, element, percent, together
from hubring.workers.compare.page.scale import Scale

HEIGHT = 260
"""Pixels, where a drawing does not say another."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One edge of a drawing.

    Attributes:
        scale: From values to places.
        title: What it counts, with the unit.
    """

    scale: Scale
    title: str


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers: its head, and whether it holds words."""

    head: str
    words: bool = False


def figure(
    name: str,
    title: str,
    says: str,
    drawing: Html,
    table: Html,
    key: Html | None = None,
    opened: bool = False,
) -> Html:
    """A drawing with all that belongs to it.

    Args:
        name: Of the element, unique in the page.
        title: Above it.
        says: What is to be seen, for those who do not see it too.
        drawing: From `canvas`.
        table: The numbers that were drawn.
        key: What the marks mean.
        opened: Whether the numbers are in sight from the start.
    """
    head = element(
        "figcaption", element("h3", title, id=f"{name}-title"), element("p", says, id=f"{name}-says")
    )
    numbers = element("details", element("summary", "Numbers: ", title), table, open=opened)
    return element("figure", head, key, drawing, numbers, id=name)


def canvas(name: str, *parts: Html | Iterable[Html], height: int = HEIGHT, kind: str = "") -> Html:
    """The drawing of the figure of that name."""
    return element(
        "svg",
        *parts,
        class_=f"chart {kind}".strip(),
        height=height,
        role="img",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-says",
    )


def axes(x: Axis, y: Axis, height: int = HEIGHT) -> Html:
    """Lines across at the y axis's ticks, labels at both, titles at their ends."""
    across = (_level(tick, y.scale) for tick in y.scale.ticks() if -1e-6 <= y.scale.place(tick) <= 1 + 1e-6)
    below = (_tick(tick, x.scale, height) for tick in x.scale.ticks() if 0 <= x.scale.place(tick) <= 1)
    titles = (
        element("text", y.title, x=-44, y=-14, class_="axis"),
        element("text", x.title, x="100%", y=height + 36, class_="axis end"),
    )
    return element("g", *across, *below, *titles)


def _level(tick: float, scale: Scale) -> Html:
    at = percent(1 - scale.place(tick))
    line = element("line", x1=0, x2="100%", y1=at, y2=at, class_="grid")
    return together(line, element("text", scale.label(tick), x=-8, y=at, dy="0.32em", class_="tick end"))


def _tick(tick: float, scale: Scale, height: int) -> Html:
    at = percent(scale.place(tick))
    line = element("line", x1=at, x2=at, y1=height, y2=height + 5, class_="axis-tick")
    return together(line, element("text", scale.label(tick), x=at, y=height + 19, class_="tick middle"))


def stretched(*parts: Html | Iterable[Html | None]) -> Html:
    """What is drawn in thousandths of width and height."""
    return element(
        "svg", *parts, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%"
    )


def path(points: Sequence[tuple[float, float]], close: bool = False) -> str:
    """A line through points given as shares of width and height, y upwards, for `stretched`."""
    drawn = "L".join(f"{1000 * x:.1f} {1000 * (1 - y):.1f}" for x, y in points)
    return f"M{drawn}{'z' if close else ''}"


def table(caption: str, columns: Sequence[Column], lines: Iterable[Sequence[str | Html]]) -> Html:
    """A table in a box of its own that can be scrolled sideways, also from the keyboard.

    Args:
        caption: What it holds.
        columns: Its heads; the first column names the line.
        lines: Cells, as many as there are columns.
    """
    heads = (element("th", each.head, scope="col", class_=_kind(each)) for each in columns)
    body = (element("tr", *_cells(columns, line)) for line in lines)
    inner = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *heads)),
        element("tbody", *body),
    )
    return element("div", inner, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _cells(columns: Sequence[Column], line: Sequence[str | Html]) -> Iterable[Html]:
    for index, (column, cell) in enumerate(zip(columns, line, strict=True)):
        if index == 0:
            yield element("th", cell, scope="row", class_="words")
        else:
            yield element("td", cell, class_=_kind(column))


def _kind(column: Column) -> str | None:
    return "words" if column.words else None
