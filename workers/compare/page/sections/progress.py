"""Progress: the metric against wall time, and the loss against samples, over all seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any, Literal

from hubring.ps.page.kit.chart import Axis
from hubring.ps.page.kit.figures import digits
from hubring.ps.page.kit.scale import Linear, Log
from hubring.workers.compare.page.figure import Figure, Table
from hubring.workers.compare.page.lines import Line, Lines, Rule, Spot
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.page.panel import Panel, unaffected
from hubring.workers.compare.result.findings import Curve, Entry, Point
from hubring.workers.compare.result.statistics import interval_words, median_interval

SPOTS, LISTED = 60, 12
"""Most points of a line that are drawn, and about how many are listed in the table."""

Kind = Literal["metric", "loss"]


def accuracy(material: Material) -> dict[str, Any] | None:
    """Returns the metric against wall time."""
    found = [_metric(material, panel, f"accuracy-{index}") for index, panel in enumerate(material.panels)]
    title = f"{material.goal.title.capitalize()} against time"
    return _shown(title, found, interval=interval_words(material.findings.seeds))


def loss(material: Material) -> dict[str, Any] | None:
    """Returns the loss against samples: the cost of asynchrony, independent of speed."""
    found = [_loss(material, panel, f"loss-{index}") for index, panel in enumerate(material.panels)]
    return _shown(f"Loss against {material.goal.samples}", found)


def _shown(title: str, found: Iterable[Figure | None], **more: str) -> dict[str, Any] | None:
    figures = [each for each in found if each is not None]
    return {"title": title, "figures": figures, **more} if figures else None


def _metric(material: Material, panel: Panel, name: str) -> Figure | None:
    drawn, goal = _lines(material, panel, "metric"), material.goal
    if not drawn:
        return None
    target = [] if goal.target is None else [goal.target]
    y = Axis(Linear.around([*_values(drawn), *target]), goal.title)
    drawing = Lines(drawn, _across(drawn, "seconds"), y, [Rule(at, f"target {at:g}") for at in target])
    caption = _ends(drawn, "after {x} s", goal.title) + _missing(material, panel, "metric")
    return _figure(name, panel, caption, drawing, goal.title)


def _loss(material: Material, panel: Panel, name: str) -> Figure | None:
    drawn, samples = _lines(material, panel, "loss"), material.goal.samples
    if not drawn:
        return None
    values = _values(drawn)
    y = Axis(Linear.around(values), "training loss")
    if min(values) > 0:
        y = Axis(Log.around(values), "training loss, log scale")
    caption = _ends(drawn, f"after {{x}} {samples}", "loss") + _missing(material, panel, "loss")
    return _figure(name, panel, caption, Lines(drawn, _across(drawn, samples), y), "loss")


def _figure(name: str, panel: Panel, caption: str, drawing: Lines, what: str) -> Figure:
    table = _table(drawing.drawn, drawing.x.title, what, panel)
    key = [(each.mark, each.label) for each in drawing.drawn]
    return Figure(name, panel.title, caption, drawing, table, key)


def _across(drawn: Sequence[Line], title: str) -> Axis:
    return Axis(Linear.around((spot.x for each in drawn for spot in each.spots), zero=True), title)


def _values(drawn: Sequence[Line]) -> list[float]:
    return [value for each in drawn for spot in each.spots for value in (spot.low, spot.high)]


def _lines(material: Material, panel: Panel, kind: Kind) -> list[Line]:
    found = []
    for entry in panel.entries:
        spots = course(_curves(material, entry), kind)
        if spots:
            found.append(
                Line(material.marks[entry.row], material.name(entry), spots, symbols=kind == "metric")
            )
    return found


def _curves(material: Material, entry: Entry) -> list[Curve]:
    """Returns a row's curves; a run that counts in several settings is recorded under one of them."""
    findings = material.findings
    here = findings.setting(entry.setting)
    mine = [each for each in findings.curves if each.row == entry.row]
    return [each for each in mine if unaffected(entry.row, findings.setting(each.setting), here)]


def course(curves: Sequence[Curve], kind: Kind) -> list[Spot]:
    """Returns a row's progress over its seeds: medians and intervals of corresponding readings.

    The i-th readings of all seeds follow the same number of samples. x is seconds for the metric, samples
    for the loss. A line ends with the seed that has the fewest readings. Above 60 readings, neighbours are
    averaged.
    """
    runs = _readings(curves, kind)
    count = min(map(len, runs), default=0)
    width = -(-count // SPOTS) or 1
    return [_spot([run[at : min(at + width, count)] for run in runs], kind) for at in range(0, count, width)]


def _readings(curves: Sequence[Curve], kind: Kind) -> list[list[Point]]:
    """Returns the readings of every seed that has any."""
    return [found for each in curves if (found := each.metric if kind == "metric" else each.loss)]


def _spot(parts: Sequence[Sequence[Point]], kind: Kind) -> Spot:
    """Returns one spot from neighbouring readings of every seed."""
    wheres = [fmean(point.seconds if kind == "metric" else point.samples for point in part) for part in parts]
    found = median_interval([fmean(point.value for point in part) for part in parts])
    return Spot(median(wheres), found.median, found.low, found.high)


def _ends(drawn: Sequence[Line], where: str, what: str) -> str:
    """Describes where each line ends."""
    ends = [
        f"{each.label} {digits(last.y)} {where.format(x=_short(last.x))}"
        for each in drawn
        for last in each.spots[-1:]
    ]
    return f"Last {what}: {'; '.join(ends)}."


def _missing(material: Material, panel: Panel, kind: Kind) -> str:
    """Names the rows that are not drawn, and those that are not drawn with all of their seeds."""
    gone, partly = list[str](), list[str]()
    for entry in panel.entries:
        drawn, seeds = len(_readings(_curves(material, entry), kind)), len(entry.seeds)
        if not drawn:
            gone.append(f"{entry.row} ({_why_absent(entry)})")
        elif drawn < seeds:
            partly.append(f" Line and band of {entry.row} are of {drawn} of {seeds} seeds.")
    return "".join([*partly, f" Not drawn: {', '.join(gone)}." if gone else ""])


def _why_absent(entry: Entry) -> str:
    return "withheld" if entry.withheld else "failed" if entry.failed else "not measured"


def _table(drawn: Sequence[Line], x: str, y: str, panel: Panel) -> Table:
    columns = ("row", x, y, "interval")
    spots = [(each.label, spot) for each in drawn for spot in _few(each.spots)]
    lines = [[label, _short(spot.x), digits(spot.y, 4), _between(spot)] for label, spot in spots]
    return Table(f"{y} by {x} with {panel.title}, a selection of the points drawn", columns, lines)


def _few(spots: Sequence[Spot]) -> list[Spot]:
    every = -(-len(spots) // LISTED)
    return [*spots[: len(spots) - 1 : every], spots[-1]]


def _between(spot: Spot) -> str:
    return "one value" if spot.low == spot.high else f"{digits(spot.low, 4)}–{digits(spot.high, 4)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else digits(value)
