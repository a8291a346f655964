"""Line charts: one line a row, with a band or whiskers where seeds differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hubring.ps.page.kit.chart import Axis, path
from hubring.workers.compare.page.mark import Mark


@dataclass(frozen=True, slots=True)
class Spot:
    """One point: where, and between what the seeds leave it."""

    x: float
    y: float
    low: float
    high: float

    @staticmethod
    def at(x: float, y: float) -> Spot:
        """A point without a spread."""
        return Spot(x, y, y, y)


@dataclass(frozen=True, slots=True)
class Line:
    """What is drawn of one row.

    Attributes:
        mark: How.
        label: Whose it is.
        spots: Through which it goes, by rising x.
        symbols: Whether each spot gets the row's symbol.
        joined: Whether a line goes through them.
        predicted: Drawn thin and without a symbol, for nobody measured it.
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
    """A row as it was measured, in symbols, and as it was predicted, as a thin line.

    Args:
        mark: How the row is drawn.
        label: Whose it is.
        points: x, what was measured there, what was predicted there; by rising x.
    """
    known = list(points)
    measured = [Spot.at(x, y) for x, y, _ in known if y is not None]
    predicted = [Spot.at(x, y) for x, _, y in known if y is not None]
    return [
        Line(mark, label, predicted, predicted=True),
        Line(mark, label, measured, symbols=True, joined=False),
    ]


class Rule(NamedTuple):
    """A line through the whole drawing at a value, with its name.

    Attributes:
        at: The value: of the y axis, or where it is `upright`, of the x axis.
        words: Its name.
        upright: It goes upwards, with its name at the top.
        row: Moves that down, where two come close.
    """

    at: float
    words: str
    upright: bool = False
    row: int = 0


@dataclass(frozen=True, slots=True)
class Lines:
    """The drawing; `lines.html` draws it.

    Attributes:
        drawn: What to draw, the last on top.
        x: The axis below.
        y: The axis at the left.
        rules: Lines through all of it.
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
        """Between the lowest and the highest that the seeds allow; nothing where they agree."""
        for line in self.drawn:
            if line.joined and not line.predicted and any(spot.low != spot.high for spot in line.spots):
                upper = [self.place(spot.x, spot.high) for spot in line.spots]
                lower = [self.place(spot.x, spot.low) for spot in reversed(line.spots)]
                yield line.mark, path([*upper, *lower], close=True)

    @property
    def strokes(self) -> Iterator[tuple[Line, str]]:
        """Lines with their paths."""
        for line in self.drawn:
            if line.joined and line.spots:
                yield line, path(self.place(spot.x, spot.y) for spot in line.spots)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies, as shares of width and height, y upwards."""
        return self.x.scale.place(x), self.y.scale.place(y)
