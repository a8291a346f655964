"""Progress: the metric against wall time, the loss against samples over all seeds, and staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from hubring.ps.page.kit.chart import Axis, LinearScale, LogScale, bins
from hubring.ps.page.kit.figures import digits, percent
from hubring.workers.compare.findings import CurvePoint, RowResult, RunCurve, thinned
from hubring.workers.compare.plan.setting import words
from hubring.workers.compare.show.material import (
    DrawnFigure,
    Lines,
    NumberTable,
    PageContent,
    Panel,
    RowLine,
    RowMark,
    Rule,
    Spot,
    unaffected,
)
from hubring.workers.compare.statistics import interval_words, median_interval

SPOTS, LISTED = 60, 12
"""Most points of a line that are drawn, and about how many are listed in the table."""

Kind = Literal["metric", "loss"]


def accuracy(material: PageContent) -> dict[str, Any] | None:
    """Returns the metric against wall time."""
    figures = _figures(material, "metric")
    title = f"{material.job.title.capitalize()} against time"
    interval = interval_words(material.findings.seeds)
    return {"title": title, "figures": figures, "interval": interval} if figures else None


def loss(material: PageContent) -> dict[str, Any] | None:
    """Returns the loss against samples: the cost of asynchrony, independent of speed."""
    figures = _figures(material, "loss")
    return {"title": f"Loss against {material.job.samples}", "figures": figures} if figures else None


def _figures(material: PageContent, kind: Kind) -> list[DrawnFigure]:
    drawn = [(panel, _lines(material, panel, kind)) for panel in material.panels]
    return [_figure(material, panel, kind, at, lines) for at, (panel, lines) in enumerate(drawn) if lines]


def _figure(
    material: PageContent, panel: Panel, kind: Kind, index: int, drawn: Sequence[RowLine]
) -> DrawnFigure:
    job = material.job
    values = [value for each in drawn for spot in each.spots for value in (spot.low, spot.high)]
    rules: list[Rule] = []
    if kind == "metric":
        name, what, across, where = "accuracy", job.title, "seconds", "after {x} s"
        rules = [] if job.target is None else [Rule(job.target, f"target {job.target:g}")]
        y = Axis(LinearScale.around([*values, *(rule.at for rule in rules)]), job.title)
    else:
        name, what, across, where = "loss", "loss", job.samples, f"after {{x}} {job.samples}"
        y = Axis(LinearScale.around(values), "training loss")
        if min(values) > 0:
            y = Axis(LogScale.around(values), "training loss, log scale")
    x = Axis(LinearScale.around((spot.x for each in drawn for spot in each.spots), zero=True), across)
    caption = _ends(drawn, where, what) + _missing(material, panel, kind)
    key = [(each.mark, each.label) for each in drawn]
    table = _table(drawn, across, what, panel)
    return DrawnFigure(f"{name}-{index}", panel.title, caption, Lines(drawn, x, y, rules), table, key)


def _lines(material: PageContent, panel: Panel, kind: Kind) -> list[RowLine]:
    return [
        RowLine(material.marks[entry.row], material.name(entry), spots, symbols=kind == "metric")
        for entry in panel.entries
        if (spots := course(_curves(material, entry), kind))
    ]


def _curves(material: PageContent, entry: RowResult) -> list[RunCurve]:
    """Returns a row's curves; a run that counts in several settings is recorded under one of them."""
    findings = material.findings
    here = findings.setting(entry.setting)
    mine = [each for each in findings.curves if each.row == entry.row]
    return [each for each in mine if unaffected(entry.row, findings.setting(each.setting), here)]


def course(curves: Sequence[RunCurve], kind: Kind) -> list[Spot]:
    """Returns a row's progress over its seeds: medians and intervals of corresponding readings.

    The i-th readings of all seeds follow the same number of samples. x is seconds for the metric, samples
    for the loss. A line ends with the seed that has the fewest readings. Above 60 readings, neighbours are
    averaged.
    """
    runs = _readings(curves, kind)
    count = min(map(len, runs), default=0)
    found = []
    for points in zip(*(thinned(run[:count], SPOTS) for run in runs), strict=True):
        where = median(point.seconds if kind == "metric" else point.samples for point in points)
        found.append(Spot(where, *median_interval([point.value for point in points])))
    return found


def _readings(curves: Sequence[RunCurve], kind: Kind) -> list[list[CurvePoint]]:
    """Returns the readings of every seed that has any."""
    return [found for each in curves if (found := each.metric if kind == "metric" else each.loss)]


def _ends(drawn: Sequence[RowLine], where: str, what: str) -> str:
    """Describes where each line ends."""
    ends = [
        f"{each.label} {digits(last.y)} {where.format(x=_short(last.x))}"
        for each in drawn
        for last in each.spots[-1:]
    ]
    return f"Last {what}: {'; '.join(ends)}."


def _missing(material: PageContent, panel: Panel, kind: Kind) -> str:
    """Names the rows that are not drawn, and those that are not drawn with all of their seeds."""
    gone, partly = list[str](), list[str]()
    for entry in panel.entries:
        drawn, seeds = len(_readings(_curves(material, entry), kind)), len(entry.seeds)
        if not drawn:
            why = "withheld" if entry.withheld else "failed" if entry.failed else "not measured"
            gone.append(f"{entry.row} ({why})")
        elif drawn < seeds:
            partly.append(f" Line and band of {entry.row} are of {drawn} of {seeds} seeds.")
    return "".join([*partly, f" Not drawn: {', '.join(gone)}." if gone else ""])


def _table(drawn: Sequence[RowLine], x: str, y: str, panel: Panel) -> NumberTable:
    columns = ("row", x, y, "interval")
    spots = [(each.label, spot) for each in drawn for spot in _few(each.spots)]
    lines = [[label, _short(spot.x), digits(spot.y, 4), _between(spot)] for label, spot in spots]
    return NumberTable(f"{y} by {x} with {panel.title}, a selection of the points drawn", columns, lines)


def _few(spots: Sequence[Spot]) -> list[Spot]:
    every = -(-len(spots) // LISTED)
    return [*spots[: len(spots) - 1 : every], spots[-1]]


def _between(spot: Spot) -> str:
    return "one value" if spot.low == spot.high else f"{digits(spot.low, 4)}–{digits(spot.high, 4)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else digits(value)


class Histogram(NamedTuple):
    """How often each whole number occurred: shares of all by label."""

    mark: RowMark
    shares: Mapping[str, float]


def staleness(material: PageContent) -> dict[str, Any] | None:
    """Returns one histogram for every asynchronous row."""
    rows = material.findings.rows
    counted = [each for each in rows if not each.synchronous and any(each.staleness.values())]
    figures = [_staleness_figure(material, index, each) for index, each in enumerate(counted)]
    top = max((max(each.drawing.shares.values()) for each in figures), default=0.0)
    title = "How stale were the gradients?"
    return {"title": title, "figures": figures, "top": top} if figures else None


def _staleness_figure(material: PageContent, index: int, entry: RowResult) -> DrawnFigure:
    counts = {int(age): count for age, count in entry.staleness.items()}
    total, title = sum(counts.values()), material.name(entry)
    shares = {each.label: each.times / total for each in bins(counts)}
    mean = sum(age * count for age, count in counts.items()) / total
    where = words(material.findings.setting(entry.setting))
    caption = f"{where}: {digits(mean, 2)} on average, {max(counts)} at most, of {total:,} pushes."
    heads = ("updates by others", "share of pushes")
    lines = [[label, percent(share)] for label, share in shares.items()]
    table = NumberTable(f"Staleness of {title} with {where}", heads, lines)
    return DrawnFigure(
        f"staleness-{index}", title, caption, Histogram(material.marks[entry.row], shares), table
    )
