"""Scaling: throughput with more workers, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from hubring.ps.page.kit.chart import Axis
from hubring.ps.page.kit.figures import NOTHING, digits, signed
from hubring.ps.page.kit.scale import Linear, Log
from hubring.workers.compare.page.figure import Figure, Table
from hubring.workers.compare.page.lines import Line, Lines, Rule, measured_and_predicted
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.page.sections.crossing import by_servers, undrawn
from hubring.workers.compare.result.findings import Scaling


def scaling(material: Material) -> dict[str, Any] | None:
    """Returns throughput by workers, step time by servers, and where hub and ring cross."""
    workers = [_by_workers(material)] if material.findings.scaling else []
    figures, crossings = [*workers, *by_servers(material)], undrawn(material)
    if not figures and not crossings:
        return None
    return {"title": "Scaling with workers and servers", "figures": figures, "crossings": crossings}


def _by_workers(material: Material) -> Figure:
    rows = material.findings.scaling
    x = Axis(Log.of(size for row in rows for size in row.workers), "workers, log scale")
    y = Axis(Linear.around(_shares(rows), zero=True), f"{material.goal.samples}/s per worker")
    drawn = list(chain.from_iterable(_pair(material, row) for row in rows))
    heads = ("row", "workers", "measured", "predicted", "off by")
    table = Table(f"{material.goal.samples.capitalize()}/s by workers", heads, list(_lines(material, rows)))
    name, key = "scaling-workers", material.key(row.row for row in rows)
    rules = [Rule(at, f"{row} overtakes", True, place) for place, (row, at) in enumerate(overtaking(rows))]
    title = "Throughput per worker, by number of workers"
    return Figure(name, title, _caption(rows), Lines(drawn, x, y, rules), table, key)


def _shares(rows: Iterable[Scaling]) -> list[float]:
    """Returns throughput per worker: constant if scaling is perfect, so that losses are visible."""
    both = ((row.workers, values) for row in rows for values in (row.measured, row.predicted))
    return [v / n for sizes, values in both for n, v in zip(sizes, values, strict=True) if v is not None]


def overtaking(rows: Sequence[Scaling]) -> list[tuple[str, int]]:
    """Returns hub rows with the number of workers from which they are predicted to beat the ring."""
    speeds = {row.row: dict(zip(row.workers, row.predicted, strict=True)) for row in rows}
    ring = {n: v for n, v in speeds.pop("ring", {}).items() if v is not None}
    found = []
    for row, mine in speeds.items():
        behind = [n for n, v in ring.items() if (mine.get(n) or 0.0) <= v]
        ahead = [n for n in ring if n > max(behind, default=0)]
        found += [(row, min(ahead))] if row.startswith("hub-") and behind and ahead else []
    return found


def _pair(material: Material, row: Scaling) -> list[Line]:
    """Returns measurements as symbols and predictions as a thin line."""
    mark, label = material.marks[row.row], material.name_under(row.row)
    points = zip(row.workers, row.measured, row.predicted, strict=True)
    shares = ((n, real and real / n, thought and thought / n) for n, real, thought in points)
    return measured_and_predicted(mark, label, shares)


def _caption(rows: Sequence[Scaling]) -> str:
    known = [(row, [n for n, value in zip(row.workers, row.measured, strict=True) if value]) for row in rows]
    texts = [f"{row.row} measured with up to {max(sizes)} workers" for row, sizes in known if sizes]
    far = max(size for row in rows for size in row.workers)
    ahead = [
        f" {row} is predicted to overtake the ring with {at:,} or more workers."
        for row, at in overtaking(rows)
    ]
    return f"{'; '.join(texts) or 'Nothing was measured'}; predicted up to {far:,}.{''.join(ahead)}"


def _lines(material: Material, rows: Iterable[Scaling]) -> Iterable[list[str]]:
    for row in rows:
        for size, real, thought in zip(row.workers, row.measured, row.predicted, strict=True):
            off = NOTHING if real is None or thought is None else signed(thought / real - 1)
            yield [material.name_under(row.row), f"{size:,}", _number(real), _number(thought), off]


def _number(value: float | None) -> str:
    return NOTHING if value is None else digits(value)
