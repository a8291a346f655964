"""Throughput, always next to time to target and the final metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hubring.workers.compare.figures import partial
from hubring.workers.compare.output.unevenness import uneven
from hubring.workers.compare.page.figure import Figure, Label, Table
from hubring.workers.compare.page.mark import Mark
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.page.panel import Panel
from hubring.workers.compare.result.findings import Entry, Number
from hubring.workers.compare.result.statistics import interval_words

COLUMNS = (
    "samples_per_second",
    "step_ms",
    "step_mean_ms",
    "seconds_to_target",
    "samples_to_target",
    "final_metric",
    "final_loss",
)


class Bar(NamedTuple):
    """One row: its value as text and its length; without a length no bar is drawn."""

    mark: Mark
    label: Label
    value: str
    length: Number | None
    note: str


def throughput(material: Material) -> dict[str, Any]:
    """Returns bars with intervals, one list per setting."""
    panels, findings = material.panels, material.findings
    part = partial(entry.number(name) for entry in findings.rows for name in COLUMNS)
    return {
        "title": "Throughput and progress",
        "interval": interval_words(findings.seeds),
        "notes": [*uneven(findings), *filter(None, [part])],
        "figures": [_figure(material, panel, f"throughput-{at}") for at, panel in enumerate(panels)],
    }


def _figure(material: Material, panel: Panel, name: str) -> Figure:
    bars = [bar(material, entry) for entry in panel.entries]
    heads = ["row", *(material.figures[each].head for each in COLUMNS), "seeds"]
    lines = [_line(material, each) for each in panel.entries]
    table = Table(f"Throughput and progress with {panel.title}", heads, lines)
    return Figure(name, panel.title, "", {"bars": bars, "reach": reach(bars)}, table)


def reach(bars: Sequence[Bar]) -> float:
    """Returns the speed at the end of the scale."""
    return max((each.length.high for each in bars if each.length), default=1.0) or 1.0


def bar(material: Material, entry: Entry) -> Bar:
    """Returns the bar of one row."""
    speed = entry.number("samples_per_second")
    figure = material.figures["samples_per_second"]
    value = "speed withheld" if entry.withheld else "not measured"
    if speed is not None:
        value = f"{figure.interval(speed)} {figure.unit}"
    return Bar(material.marks[entry.row], material.label(entry), value, speed, _note(material, entry))


def _note(material: Material, entry: Entry) -> str:
    """Returns time to target and final metric, as far as known."""
    figures, target, parts = material.figures, material.goal.target, []
    reached = entry.number("seconds_to_target")
    if target is not None and reached is not None:
        missed = len(entry.seeds) - reached.seeds
        parts.append(f"{target:g} reached after {figures['seconds_to_target'].span(reached)} s")
        parts += [f"but not in {missed} of {len(entry.seeds)} seeds"] if missed else []
    elif target is not None and entry.withheld is None:
        parts.append(f"{target:g} not reached")
    final = entry.number("final_metric")
    parts += [f"{material.goal.title} {figures['final_metric'].interval(final)} at the end"] if final else []
    parts += [f"failed: {entry.failed}"] if entry.failed else []
    return ", ".join([*parts, *(["one seed"] if len(entry.seeds) == 1 else [])])


def _line(material: Material, entry: Entry) -> list[str | Label]:
    cells: list[str | Label] = [material.figures[each].interval(entry.number(each)) for each in COLUMNS]
    return [material.label(entry), *cells, str(len(entry.seeds))]
