"""Bars: one row below the other, names and values as text that wraps, so that they fit a phone.

Each is a list item: who cannot see the bars reads the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hubring.ps.markup import Html, Value, element, percent, together
from hubring.workers.compare.findings import Number
from hubring.workers.compare.page.mark import Mark

HEIGHT = 14


@dataclass(frozen=True, slots=True)
class Bar:
    """One row.

    Attributes:
        mark: How it is drawn.
        label: Whose it is.
        value: Its length in words.
        length: How long; None: there is no bar, and `value` says why.
        note: What else belongs to it.
    """

    mark: Mark
    label: Html
    value: str
    length: Number | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stacked bar: what it stands for, a class of the style sheet, and how long it is."""

    kind: str
    length: float


def bars(drawn: Sequence[Bar]) -> Html:
    """Bars with whiskers; the longest reach is the whole width."""
    reach = max((each.length.high for each in drawn if each.length), default=1.0) or 1.0
    return element("ol", *(_item(each, reach) for each in drawn), class_="bars")


def _item(bar: Bar, reach: float) -> Html:
    drawing = None if bar.length is None else _bar(bar.length, bar.mark, reach)
    note = element("span", bar.note, class_="note") if bar.note else None
    return element("li", headline(bar.mark, bar.label, bar.value), drawing, note)


def headline(mark: Mark, label: Html, value: str) -> Html:
    """Whose bar it is, at the left, and how long, at the right."""
    symbol = element("svg", mark.symbol("6", "6"), width=12, height=12, aria_hidden="true")
    who = element("span", symbol, " ", label, class_="who")
    return element("span", who, " ", element("span", value, class_="value"), class_="headline")


def _bar(length: Number, mark: Mark, reach: float) -> Html:
    body = element("rect", width=percent(length.median / reach), height=HEIGHT)
    return _drawing(together(body, _whisker(length, reach)), HEIGHT, mark.accent)


def _whisker(length: Number, reach: float) -> Html | None:
    if length.low == length.high:
        return None
    low, high, middle = percent(length.low / reach), percent(length.high / reach), HEIGHT / 2
    ends = [element("line", x1=at, x2=at, y1=3, y2=HEIGHT - 3) for at in (low, high)]
    across = element("line", x1=low, x2=high, y1=middle, y2=middle)
    # Once wider in the colour of the paper, so that it can be seen on the bar too.
    return together(element("g", across, *ends, class_=f"whisker{kind}") for kind in (" halo", ""))


def stack(pieces: Iterable[Piece], start: float, reach: float, height: int, mark: Mark) -> Html:
    """Pieces end to end.

    Args:
        pieces: From left to right.
        start: Where the first begins, in the unit of their lengths.
        reach: What is as long as the drawing is wide.
        height: In pixels.
        mark: Sets the colour.
    """
    drawn, at = [], start
    for piece in pieces:
        place: dict[str, Value] = {
            "x": percent(at / reach),
            "width": percent(piece.length / reach),
            "height": height,
        }
        drawn.append(element("rect", **place, class_=f"piece {piece.kind}"))
        if piece.kind == "read":
            drawn.append(element("rect", **place, class_="hatched"))
        at += piece.length
    return _drawing(together(*drawn), height, mark.accent)


def _drawing(parts: Html, height: int, accent: str) -> Html:
    return element("svg", parts, height=height, class_=f"bar {accent}", aria_hidden="true")
