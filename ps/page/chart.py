"""A curve over time, for a drawing as wide as its box whose words keep their size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from hubring.ps.markup import Html, element, percent, together
from hubring.ps.page.figures import duration

HEIGHT = 150
"""Pixels."""


def ticks(low: float, high: float) -> list[float]:
    """Round values, rising; the first is at most `low`, the last at least `high`. Three to six of them."""
    spread = (high - low) or abs(high) or 1.0
    ten = 10.0 ** math.floor(math.log10(spread / 3))
    step = next(ten * digit for digit in (1, 2, 5, 10) if 5 * ten * digit >= spread)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def curve(
    name: str, title: str, points: Sequence[tuple[float, float]], write: Callable[[float], str]
) -> Html:
    """The drawing.

    Args:
        name: What ids begin with.
        title: What is drawn, for those who do not see it.
        points: Seconds, rising, and values; at least one.
        write: Spells a value.
    """
    levels = ticks(min(value for _, value in points), max(value for _, value in points))
    begin, end = points[0][0], points[-1][0]
    across = (end - begin) or 1.0
    up = levels[-1] - levels[0]
    places = [((at - begin) / across, (value - levels[0]) / up) for at, value in points]
    course = "L".join(f"{1000 * x:.1f} {1000 * (1 - y):.1f}" for x, y in places)
    # One sample alone would be a line without length: it goes level through the drawing.
    path = f"M{course}" if len(points) > 1 else f"M0 {1000 * (1 - places[0][1]):.1f}H1000"
    stretched = element(
        "svg",
        element("path", d=path, class_="stroke"),
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )
    said = f"From {write(points[0][1])} to {write(points[-1][1])} in {duration(across)}."
    return element(
        "svg",
        element("title", title, id=f"{name}-name"),
        element("desc", said, id=f"{name}-said"),
        *(_level(level, (level - levels[0]) / up, write) for level in levels),
        stretched,
        element("text", duration(begin), x=0, y=HEIGHT + 18, class_="tick"),
        element("text", duration(end), x="100%", y=HEIGHT + 18, class_="tick end"),
        height=HEIGHT,
        class_="curve",
        role="img",
        aria_labelledby=f"{name}-name",
        aria_describedby=f"{name}-said",
    )


def _level(level: float, share: float, write: Callable[[float], str]) -> Html:
    at = percent(1 - share)
    line = element("line", x1=0, x2="100%", y1=at, y2=at, class_="grid")
    return together(line, element("text", write(level), x=-8, y=at, dy="0.32em", class_="tick end"))


@lru_cache(maxsize=256)
def bar(share: float, kind: str) -> Html:
    """A bar within a table, from 0 to 1; the cell beside it says what it shows."""
    shown = element("rect", width=percent(share), height=10)
    return element("svg", shown, class_=f"bar {kind}", height=10, aria_hidden="true")
