"""Staleness: how old the parameters were that gradients were made from."""

from __future__ import annotations

from collections.abc import Mapping

from hubring.ps.markup import Html, element
from hubring.workers.compare.circumstance import words
from hubring.workers.compare.figures import digits, percent
from hubring.workers.compare.findings import Entry
from hubring.workers.compare.page.chart import Column, figure, table
from hubring.workers.compare.page.chart_histogram import bins, histogram
from hubring.workers.compare.page.material import IN_SIGHT, Material, section


def staleness(material: Material) -> Html | None:
    """One histogram for every row that let workers run apart."""
    counted = _counted(material)
    if not counted:
        return None
    top = max(each.share for entry in counted for each in bins(_counts(entry)))
    found = [_figure(material, index, each, top) for index, each in enumerate(counted)]
    lead = (
        "Updates by others between a worker’s read and its own push: 0 is as fresh as a synchronous step."
        " Shares of all pushes, over all seeds."
    )
    seen, rest = found[: 3 * IN_SIGHT], found[3 * IN_SIGHT :]
    more = element("summary", f"{len(rest)} more histograms")
    folded = element("details", more, element("div", *rest, class_="small-multiples"), class_="more")
    grid = element("div", *seen, class_="small-multiples")
    return section("staleness", "How stale were the gradients?", lead, grid, folded if rest else None)


def _counted(material: Material) -> list[Entry]:
    return [each for each in material.findings.rows if not each.synchronous and any(each.staleness.values())]


def _counts(entry: Entry) -> dict[int, int]:
    return {int(age): count for age, count in entry.staleness.items()}


def _figure(material: Material, index: int, entry: Entry, top: float) -> Html:
    name, title, found = f"staleness-{index}", material.name(entry), bins(_counts(entry))
    lines = [[each.label, percent(each.share)] for each in found]
    where = words(material.findings.setting(entry.setting), entry.setting)
    heads = (Column("updates by others"), Column("share of pushes"))
    told = table(f"Staleness of {title} with {where}", heads, lines)
    drawing = histogram(name, found, top, material.marks[entry.row])
    return figure(name, title, f"{where}: {_says(_counts(entry))}", drawing, told)


def _says(counts: Mapping[int, int]) -> str:
    total = sum(counts.values())
    mean = sum(age * count for age, count in counts.items()) / total
    return f"{digits(mean, 2)} on average, {max(counts)} at most, of {total:,} pushes."
