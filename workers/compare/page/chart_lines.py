"""Line charts: one line a row, with a band or whiskers where seeds differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hubring.ps.markup import Html, element, percent, together
from hubring.workers.compare.page.chart import HEIGHT, Axis, axes, canvas, path, stretched
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


def lines(
    name: str, drawn: Sequence[Line], x: Axis, y: Axis, rules: Iterable[Html] = (), height: int = HEIGHT
) -> Html:
    """The drawing.

    Args:
        name: Of its figure.
        drawn: What to draw, the last on top.
        x: The axis below.
        y: The axis at the left.
        rules: From `level` and `upright`.
        height: In pixels.
    """
    full = [each for each in drawn if each.spots]
    return canvas(
        name,
        axes(x, y, height),
        *rules,
        stretched(_band(each, x, y) for each in full if not each.predicted),
        stretched(_stroke(each, x, y) for each in full if each.joined),
        *(_symbols(each, x, y) for each in full if each.symbols and not each.predicted),
        height=height,
        kind="lines",
    )


def level(value: float, y: Axis, words: str) -> Html:
    """A line across at a value, with its name."""
    at = percent(1 - y.scale.place(value))
    line = element("line", x1=0, x2="100%", y1=at, y2=at)
    return element("g", line, element("text", words, x="100%", y=at, dy=14, class_="end"), class_="rule")


def upright(value: float, x: Axis, words: str, row: int = 0) -> Html:
    """A line upwards at a value, with its name at the top; `row` moves that down, where two come close."""
    share = x.scale.place(value)
    at, end = percent(share), share > 0.6
    line = element("line", x1=at, x2=at, y1=0, y2="100%")
    label = element("text", words, x=at, y=12 + 16 * row, dx=-6 if end else 6, class_="end" if end else None)
    return element("g", line, label, class_="rule")


def _band(line: Line, x: Axis, y: Axis) -> Html | None:
    """Between the lowest and the highest that the seeds allow; nothing where they agree."""
    if all(spot.low == spot.high for spot in line.spots) or not line.joined:
        return None
    upper = [(x.scale.place(spot.x), y.scale.place(spot.high)) for spot in line.spots]
    lower = [(x.scale.place(spot.x), y.scale.place(spot.low)) for spot in reversed(line.spots)]
    return element("path", d=path([*upper, *lower], close=True), class_=f"band {line.mark.accent}")


def _stroke(line: Line, x: Axis, y: Axis) -> Html:
    places = [(x.scale.place(spot.x), y.scale.place(spot.y)) for spot in line.spots]
    return element(
        "path",
        d=path(places),
        class_=f"stroke {line.mark.accent}{' predicted' if line.predicted else ''}",
        stroke_dasharray=line.mark.dash or None,
    )


def _symbols(line: Line, x: Axis, y: Axis) -> Html:
    return together(_symbol(line, spot, x, y) for spot in line.spots)


def _symbol(line: Line, spot: Spot, x: Axis, y: Axis) -> Html:
    at, up = percent(x.scale.place(spot.x)), percent(1 - y.scale.place(spot.y))
    whisker = None
    if spot.low != spot.high and not line.joined:
        ends = [percent(1 - y.scale.place(value)) for value in (spot.low, spot.high)]
        whisker = element("line", x1=at, x2=at, y1=ends[0], y2=ends[1], class_=f"whisker {line.mark.accent}")
    words = f"{line.label}: {spot.y:.4g} at {spot.x:.4g}".removeprefix(": ")
    return together(whisker, line.mark.symbol(at, up, words))
