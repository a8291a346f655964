"""Staleness: the age of the parameters from which gradients were computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hubring.ps.page.kit.chart import bins
from hubring.ps.page.kit.figures import digits, percent
from hubring.workers.compare.page.figure import Figure, Table
from hubring.workers.compare.page.mark import Mark
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.findings import Entry
from hubring.workers.compare.result.setting_text import words


class Histogram(NamedTuple):
    """How often each whole number occurred: shares of all by label."""

    mark: Mark
    shares: Mapping[str, float]


def staleness(material: Material) -> dict[str, Any] | None:
    """Returns one histogram for every asynchronous row."""
    rows = material.findings.rows
    counted = [each for each in rows if not each.synchronous and any(each.staleness.values())]
    figures = [_figure(material, index, each) for index, each in enumerate(counted)]
    top = max((max(each.drawing.shares.values()) for each in figures), default=0.0)
    title = "How stale were the gradients?"
    return {"title": title, "figures": figures, "top": top} if figures else None


def _figure(material: Material, index: int, entry: Entry) -> Figure:
    counts = {int(age): count for age, count in entry.staleness.items()}
    total, title = sum(counts.values()), material.name(entry)
    shares = {each.label: each.times / total for each in bins(counts)}
    mean = sum(age * count for age, count in counts.items()) / total
    where = words(material.findings.setting(entry.setting), entry.setting)
    caption = f"{where}: {digits(mean, 2)} on average, {max(counts)} at most, of {total:,} pushes."
    heads = ("updates by others", "share of pushes")
    lines = [[label, percent(share)] for label, share in shares.items()]
    table = Table(f"Staleness of {title} with {where}", heads, lines)
    return Figure(f"staleness-{index}", title, caption, Histogram(material.marks[entry.row], shares), table)
