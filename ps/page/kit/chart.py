"""The data of charts; `chart.html` draws them.

A chart fills the available width, with text of a fixed size. x is a fraction of the width, y of a fixed
height. Labels are in the margins, which are the SVG's padding. SVG paths cannot use fractions, so paths are
in an inner SVG of 1000 by 1000 that is stretched, with strokes of a fixed width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hubring.ps.page.kit.scale import Scale


class Tick(NamedTuple):
    """A position on an axis, as a fraction of its length, and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart.

    Attributes:
        scale: Maps values to positions.
        title: The quantity, with its unit.
        write: Formats a tick instead of the scale's own labels.
    """

    scale: Scale
    title: str = ""
    write: Callable[[float], str] | None = None

    @property
    def ticks(self) -> list[Tick]:
        """The ticks within the chart."""
        write, places = self.write or self.scale.label, self.scale.ticks()
        known = [Tick(self.scale.place(value), write(value)) for value in places]
        return [tick for tick in known if -1e-6 <= tick.at <= 1 + 1e-6]


def path(points: Iterable[tuple[float, float]], close: bool = False) -> str:
    """Returns an SVG path for `stretched`. Points are fractions of width and height, with y upwards."""
    drawn = "L".join(f"{1000 * x:.1f} {1000 * (1 - y):.1f}" for x, y in points)
    return f"M{drawn}{'z' if close else ''}"


class Bin(NamedTuple):
    """A bin of the whole numbers from `first` to `last`, and how often they occur."""

    first: int
    last: int
    times: int

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


MOST_BINS = 16


def bins(counts: Mapping[int, int]) -> tuple[Bin, ...]:
    """Returns at most 16 bins of equal width, from 0 on; none if there are no counts."""
    if not counts:
        return ()
    top = max(counts)
    width = -(-(top + 1) // MOST_BINS)
    return tuple(
        Bin(low, low + width - 1, sum(counts.get(n, 0) for n in range(low, low + width)))
        for low in range(0, top + 1, width)
    )
