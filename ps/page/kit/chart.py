"""What charts are drawn from; `chart.html` draws it.

A drawing fills whatever width there is and keeps its text at one size: x is a share of the width, y of
a fixed height, and labels lie in the margins, which are the SVG's padding. Lines, which SVG cannot draw in
shares, are in an inner SVG of 1000 by 1000 that is stretched while their pens are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hubring.ps.page.kit.scale import Scale


class Tick(NamedTuple):
    """A place at an edge, as a share of its length, and what is written there."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """One edge of a drawing.

    Attributes:
        scale: From values to places.
        title: What it counts, with the unit.
        write: Spells a tick, where the scale's own label does not do.
    """

    scale: Scale
    title: str = ""
    write: Callable[[float], str] | None = None

    @property
    def ticks(self) -> list[Tick]:
        """Those that lie within the drawing."""
        write, places = self.write or self.scale.label, self.scale.ticks()
        known = [Tick(self.scale.place(value), write(value)) for value in places]
        return [tick for tick in known if -1e-6 <= tick.at <= 1 + 1e-6]


def path(points: Iterable[tuple[float, float]], close: bool = False) -> str:
    """A line through points given as shares of width and height, y upwards, for `stretched`."""
    drawn = "L".join(f"{1000 * x:.1f} {1000 * (1 - y):.1f}" for x, y in points)
    return f"M{drawn}{'z' if close else ''}"


class Bin(NamedTuple):
    """Whole numbers from `first` to `last`, and how many times they came up."""

    first: int
    last: int
    times: int

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


MOST_BINS = 16


def bins(counts: Mapping[int, int]) -> tuple[Bin, ...]:
    """At most 16 of them, equally wide, from 0 on; none where nothing was counted."""
    if not counts:
        return ()
    top = max(counts)
    width = -(-(top + 1) // MOST_BINS)
    return tuple(
        Bin(low, low + width - 1, sum(counts.get(n, 0) for n in range(low, low + width)))
        for low in range(0, top + 1, width)
    )
