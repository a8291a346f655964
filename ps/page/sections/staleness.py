"""By how many versions gradients were behind the values that they were applied to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hubring.ps.markup import Html, element
from hubring.ps.page.chart import bar
from hubring.ps.page.memo import Memo
from hubring.ps.page.moment import Moment
from hubring.ps.page.section import Section
from hubring.ps.page.table import headed, row, table

MOST = 16
"""Bins."""


class Bin(NamedTuple):
    """Staleness from `first` to `last`, and how many pushes had it."""

    first: int
    last: int
    pushes: int

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


def bins(counts: Mapping[int, int]) -> tuple[Bin, ...]:
    """At most 16 of them, equally wide, from 0 on; none where nothing was counted."""
    if not counts:
        return ()
    top = max(counts)
    width = -(-(top + 1) // MOST)
    return tuple(
        Bin(low, low + width - 1, sum(counts.get(n, 0) for n in range(low, low + width)))
        for low in range(0, top + 1, width)
    )


def staleness(moment: Moment, memo: Memo) -> Section:
    """A histogram."""
    return Section(memo("staleness", _made, bins(moment.staleness), moment.on_ring))


def _made(found: tuple[Bin, ...], on_ring: bool) -> Html:
    if on_ring:
        words = "Around the ring every gradient belongs to the values that it is applied to."
        return headed("staleness", "Staleness", element("p", words, class_="soft"))
    if not found:
        return headed("staleness", "Staleness", element("p", "No gradient was applied yet.", class_="soft"))
    total, top = sum(each.pushes for each in found), max(each.pushes for each in found)
    rows = [
        row(
            each.label,
            bar(each.pushes / top, "stale"),
            f"{100 * each.pushes / total:.1f} %",
            f"{each.pushes:,}",
        )
        for each in found
    ]
    heads = ("Versions behind", "How often", "Share", "Pushes")
    inner = table("staleness-table", "Gradients by their staleness, on all shards", heads, rows)
    return headed("staleness", "Staleness", inner)
