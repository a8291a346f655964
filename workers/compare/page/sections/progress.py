"""Progress: the measure against wall time, and the loss against samples, over all seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Literal

from hubring.ps.markup import Html
from hubring.workers.compare.figures import digits
from hubring.workers.compare.findings import Curve, Entry, Point
from hubring.workers.compare.page.chart import Axis, Column, figure, table
from hubring.workers.compare.page.chart_lines import Line, Spot, level, lines
from hubring.workers.compare.page.mark import key
from hubring.workers.compare.page.material import Material, folded, section
from hubring.workers.compare.page.panel import Panel, unaffected
from hubring.workers.compare.page.scale import Linear, Log
from hubring.workers.compare.statistics import interval_words, median_interval

SPOTS, TOLD = 60, 12
"""How many points are drawn of a line, and how many are told in numbers."""

Kind = Literal["metric", "loss"]


def accuracy(material: Material) -> Html | None:
    """The measure against wall time: what a user waits for."""
    goal = material.goal
    lead = (
        f"What counts in the end: {goal.title}, against the time on the clock since the first step."
        f" Each line is the median over seeds; its band {interval_words(material.findings.seeds)}."
    )
    found = [_metric(material, panel, f"accuracy-{index}") for index, panel in enumerate(material.panels)]
    return _section("accuracy", f"{goal.title.capitalize()} against time", lead, found)


def loss(material: Material) -> Html | None:
    """The loss against samples: what asynchrony costs, free of how fast anything ran."""
    lead = (
        "The same samples, whatever time they took. Lines that lie on each other learn alike from each"
        " sample; one that lies higher pays for stale gradients. Training loss, means of neighbouring steps."
    )
    found = [_loss(material, panel, f"loss-{index}") for index, panel in enumerate(material.panels)]
    return _section("loss", f"Loss against {material.goal.samples}", lead, found)


def _section(name: str, title: str, lead: str, found: Iterable[Html | None]) -> Html | None:
    there = [each for each in found if each is not None]
    return section(name, title, lead, folded(there, "setting")) if there else None


def _metric(material: Material, panel: Panel, name: str) -> Html | None:
    drawn = _lines(material, panel, "metric")
    if not drawn:
        return None
    goal, spots = material.goal, [spot for each in drawn for spot in each.spots]
    values = [value for spot in spots for value in (spot.low, spot.high)]
    target = [] if goal.target is None else [goal.target]
    x = Axis(Linear.around((spot.x for spot in spots), zero=True), "seconds")
    y = Axis(Linear.around([*values, *target]), goal.title)
    rules = [level(value, y, f"target {value:g}") for value in target]
    says = _ends(drawn, "after {x} s", goal.title) + _missing(material, panel, drawn)
    told = _table(drawn, "seconds", goal.title, panel)
    drawing = lines(name, drawn, x, y, rules)
    return figure(name, panel.title, says, drawing, told, key((each.mark, each.label) for each in drawn))


def _loss(material: Material, panel: Panel, name: str) -> Html | None:
    drawn = _lines(material, panel, "loss")
    if not drawn:
        return None
    spots = [spot for each in drawn for spot in each.spots]
    x = Axis(Linear.around((spot.x for spot in spots), zero=True), material.goal.samples)
    values = [value for spot in spots for value in (spot.low, spot.high)]
    logarithmic = min(values) > 0
    scale = Log.around(values) if logarithmic else Linear.around(values)
    y = Axis(scale, "training loss, log scale" if logarithmic else "training loss")
    says = _ends(drawn, f"after {{x}} {material.goal.samples}", "loss") + _missing(material, panel, drawn)
    told = _table(drawn, material.goal.samples, "loss", panel)
    return figure(
        name,
        panel.title,
        says,
        lines(name, drawn, x, y),
        told,
        key((each.mark, each.label) for each in drawn),
    )


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
    """A row's curves; where one run counts in several settings they stand under one of these."""
    mine = [each for each in material.findings.curves if each.row == entry.row]
    here = [each for each in mine if each.setting == entry.setting]
    same = [each for each in mine if unaffected(entry.row, each.setting, entry.setting)]
    return here or [each for each in same if each.setting == same[0].setting]


def course(curves: Sequence[Curve], kind: Kind) -> list[Spot]:
    """How a row went over its seeds: medians and intervals of the readings that belong together.

    The i-th reading of each seed is after the same samples. x is seconds for the measure, samples for the
    loss; where a seed has fewer readings than another, the line ends with it. More than 60 readings are
    taken together by neighbours, as means.
    """
    runs = [readings for each in curves if (readings := each.metric if kind == "metric" else each.loss)]
    count = min(map(len, runs), default=0)
    width = -(-count // SPOTS) or 1
    return [_spot([run[at : min(at + width, count)] for run in runs], kind) for at in range(0, count, width)]


def _spot(parts: Sequence[Sequence[Point]], kind: Kind) -> Spot:
    """One spot of the neighbouring readings of every seed."""
    wheres = [fmean(point.seconds if kind == "metric" else point.samples for point in part) for part in parts]
    found = median_interval([fmean(point.value for point in part) for part in parts])
    return Spot(median(wheres), found.median, found.low, found.high)


def _ends(drawn: Sequence[Line], where: str, what: str) -> str:
    """Where each line ends, in words."""
    ends = [
        f"{each.label} {digits(last.y)} {where.format(x=_short(last.x))}"
        for each in drawn
        for last in each.spots[-1:]
    ]
    return f"Last {what}: {'; '.join(ends)}."


def _missing(material: Material, panel: Panel, drawn: Sequence[Line]) -> str:
    there = {each.label for each in drawn}
    gone = [entry.row for entry in panel.entries if material.name(entry) not in there]
    return (
        f" Not drawn, for nothing was measured or its speed is withheld: {', '.join(gone)}." if gone else ""
    )


def _table(drawn: Sequence[Line], x: str, y: str, panel: Panel) -> Html:
    columns = (Column("row"), Column(x), Column(y), Column("interval"))
    told = [(each.label, spot) for each in drawn for spot in _few(each.spots)]
    lines = [[label, _short(spot.x), digits(spot.y, 4), _between(spot)] for label, spot in told]
    return table(f"{y} by {x} with {panel.title}, a selection of the points drawn", columns, lines)


def _few(spots: Sequence[Spot]) -> list[Spot]:
    every = -(-len(spots) // TOLD)
    return [*spots[: len(spots) - 1 : every], spots[-1]]


def _between(spot: Spot) -> str:
    return "one value" if spot.low == spot.high else f"{digits(spot.low, 4)}–{digits(spot.high, 4)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else digits(value)
