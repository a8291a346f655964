"""Line charts: one line per row, with a band or whiskers where seeds differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hubring.ps.page.kit.chart import Axis, path
from hubring.workers.compare.page.mark import Mark


@dataclass(frozen=True, slots=True)
class Spot:
    """One point and its interval over seeds."""

    x: float
    y: float
    low: float
    high: float

    @staticmethod
    def at(x: float, y: float) -> Spot:
        """Returns a point without an interval."""
        return Spot(x, y, y, y)


@dataclass(frozen=True, slots=True)
class Line:
    """The line of one row.

    Attributes:
        mark: Colour, dash and symbol.
        label: Name of the row.
        spots: Its points, in ascending x.
        symbols: Whether to draw the row's symbol at each spot.
        joined: Whether to draw a line through the spots.
        predicted: Drawn thin and without symbols, because it was not measured.
    """

    mark: Mark
    label: str
    spots: Sequence[Spot]
    symbols: bool = False
    joined: bool = True
    predicted: bool = False


def measured_and_predicted(
    mark: Mark, label: str, points: Iterable[tuple[float, float | None, float | None]]
) -> list[Line]:
    """Returns a row's measurements as symbols and its predictions as a thin line.

    Args:
        mark: The row's mark.
        label: Name of the row.
        points: (x, measured, predicted), in ascending x.
    """
    known = list(points)
    measured = [Spot.at(x, y) for x, y, _ in known if y is not None]
    predicted = [Spot.at(x, y) for x, _, y in known if y is not None]
    return [
        Line(mark, label, predicted, predicted=True),
        Line(mark, label, measured, symbols=True, joined=False),
    ]


class Rule(NamedTuple):
    """A line across the whole drawing, with a name.

    Attributes:
        at: Its value on the y axis, or on the x axis if `upright`.
        words: Its name.
        upright: Whether it is vertical, with its name at the top.
        row: Moves the name down, to keep names apart.
    """

    at: float
    words: str
    upright: bool = False
    row: int = 0


@dataclass(frozen=True, slots=True)
class Lines:
    """The drawing; `lines.html` draws it.

    Attributes:
        drawn: The lines, the last on top.
        x: The axis at the bottom.
        y: The axis at the left.
        rules: Lines across the drawing.
        fair: Paths of a band and of the line within it, in the background.
        height: In pixels.
    """

    drawn: Sequence[Line]
    x: Axis
    y: Axis
    rules: Sequence[Rule] = ()
    fair: tuple[str, str] | None = None
    height: int = 260

    @property
    def bands(self) -> Iterator[tuple[Mark, str]]:
        """Bands between the ends of the intervals, for lines whose seeds differ."""
        for line in self.drawn:
            if line.joined and not line.predicted and any(spot.low != spot.high for spot in line.spots):
                upper = [self.place(spot.x, spot.high) for spot in line.spots]
                lower = [self.place(spot.x, spot.low) for spot in reversed(line.spots)]
                yield line.mark, path([*upper, *lower], close=True)

    @property
    def strokes(self) -> Iterator[tuple[Line, str]]:
        """The lines with their paths."""
        for line in self.drawn:
            if line.joined and line.spots:
                yield line, path(self.place(spot.x, spot.y) for spot in line.spots)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Returns the position of a point as shares of width and height, with y upwards."""
        return self.x.scale.place(x), self.y.scale.place(y)
