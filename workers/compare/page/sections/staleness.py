"""Staleness: how old the parameters were that gradients were made from."""

from __future__ import annotations

from workers.compare.figures import digits, percent
from workers.compare.findings import Entry
from workers.compare.page.chart import Column, figure, table
from workers.compare.page.chart_histogram import bins, histogram
from workers.compare.page.element import Html, element
from workers.compare.page.material import IN_SIGHT, Material, section


def staleness(material: Material) -> Html | None:
    """One histogram for every row that let workers run apart."""
    found = [_figure(material, index, each) for index, each in enumerate(_counted(material))]
    if not found:
        return None
    lead = (
        "Updates by others between a worker's read and its own push: 0 is as fresh as a synchronous step."
        " Shares of all pushes, over all seeds."
    )
    seen, rest = found[: 3 * IN_SIGHT], found[3 * IN_SIGHT :]
    more = element("summary", f"{len(rest)} more histograms")
    folded = element("details", more, element("div", *rest, class_="small-multiples"), class_="more")
    grid = element("div", *seen, class_="small-multiples")
    return section("staleness", "How stale were the gradients?", lead, grid, folded if rest else None)


def _counted(material: Material) -> list[Entry]:
    return [each for each in material.findings.rows if not each.synchronous and any(each.staleness.values())]


def _figure(material: Material, index: int, entry: Entry) -> Html:
    name, counts = f"staleness-{index}", {int(key): count for key, count in entry.staleness.items()}
    found = bins(counts)
    total = sum(counts.values())
    mean = sum(number * count for number, count in counts.items()) / total
    says = f"On average {digits(mean, 2)}, at most {max(counts)}; {total:,} pushes."
    several = len(material.findings.setting_keys) > 1
    title = f"{material.name(entry)}{f', {entry.setting}' if several else ''}"
    lines = [[each.label, percent(each.share)] for each in found]
    told = table(f"Staleness of {title}", (Column("updates by others"), Column("share of pushes")), lines)
    return figure(name, title, says, histogram(name, found, material.marks[entry.row]), told)
