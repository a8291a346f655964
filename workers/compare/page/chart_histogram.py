"""Histograms: how often each whole number came up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hubring.ps.markup import Html, Value, element, percent
from hubring.workers.compare.figures import percent as in_percent
from hubring.workers.compare.page.chart import canvas
from hubring.workers.compare.page.mark import Mark

HEIGHT, MOST = 110, 16


@dataclass(frozen=True, slots=True)
class Bin:
    """Numbers from `first` to `last`, and their share of all."""

    first: int
    last: int
    share: float

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


def bins(counts: Mapping[int, int]) -> list[Bin]:
    """At most 16 of them, equally wide, from 0 on."""
    total, top = sum(counts.values()), max(counts)
    width = -(-(top + 1) // MOST)
    return [
        Bin(low, low + width - 1, sum(counts.get(n, 0) for n in range(low, low + width)) / total)
        for low in range(0, top + 1, width)
    ]


def histogram(name: str, found: list[Bin], top: float, mark: Mark) -> Html:
    """The drawing; the highest bar has its share written on it, and every one of few.

    Args:
        name: Of its figure.
        found: What to draw.
        top: The share that is as high as the drawing, so that several can be compared.
        mark: Sets the colour.
    """
    highest = max(each.share for each in found)
    few = len(found) <= 6
    parts = (
        _column(index, each, len(found), few or each.share == highest, top)
        for index, each in enumerate(found)
    )
    base = element("line", x1=0, x2="100%", y1=HEIGHT, y2=HEIGHT, class_="axis-tick")
    return canvas(name, *parts, base, height=HEIGHT, kind=f"histogram {mark.accent}")


def _column(index: int, column: Bin, count: int, told: bool, top: float) -> Html:
    high = (HEIGHT - 18) * column.share / top
    middle = percent((index + 0.5) / count)
    title = element("title", f"{column.label}: {in_percent(column.share)}")
    place: dict[str, Value] = {"x": percent((index + 0.08) / count), "y": HEIGHT - high}
    body = element("rect", title, **place, width=percent(0.84 / count), height=high)
    label = element("text", column.label, x=middle, y=HEIGHT + 16, class_="tick middle")
    share = element("text", in_percent(column.share), x=middle, y=HEIGHT - high - 5, class_="tick middle")
    return element("g", body, share if told else None, label if index % -(-count // 8) == 0 else None)
