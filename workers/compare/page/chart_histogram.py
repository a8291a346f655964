"""Histograms: how often each whole number came up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.compare.figures import percent as in_percent
from workers.compare.page.chart import canvas
from workers.compare.page.element import Html, element, percent
from workers.compare.page.mark import Mark

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


def histogram(name: str, found: list[Bin], mark: Mark) -> Html:
    """The drawing; a bar that is one of few has its share written on it."""
    top = max(each.share for each in found)
    parts = (_column(index, each, len(found), top) for index, each in enumerate(found))
    base = element("line", x1=0, x2="100%", y1=HEIGHT, y2=HEIGHT, class_="axis-tick")
    return canvas(name, *parts, base, height=HEIGHT, kind=f"histogram {mark.accent}")


def _column(index: int, column: Bin, count: int, top: float) -> Html:
    high = (HEIGHT - 18) * column.share / top
    middle = percent((index + 0.5) / count)
    label = element("text", column.label, x=middle, y=HEIGHT + 16, class_="tick middle")
    body = element(
        "rect",
        element("title", f"{column.label}: {in_percent(column.share)}"),
        x=percent((index + 0.08) / count),
        width=percent(0.84 / count),
        y=HEIGHT - high,
        height=high,
    )
    share = element("text", in_percent(column.share), x=middle, y=HEIGHT - high - 5, class_="tick middle")
    few, every = count <= 6, -(-count // 8)
    return element("g", body, share if few else None, label if index % every == 0 else None)
