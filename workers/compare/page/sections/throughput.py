"""Throughput, and beside it always what it was good for: time to target and final measure."""

from __future__ import annotations

from hubring.ps.markup import Html, element
from hubring.workers.compare.findings import Entry
from hubring.workers.compare.page.chart import Column, table
from hubring.workers.compare.page.chart_bars import Bar, bars
from hubring.workers.compare.page.material import Material, folded, section
from hubring.workers.compare.page.panel import Panel
from hubring.workers.compare.statistics import interval_words
from hubring.workers.compare.unevenness import uneven

TOLD = (
    "samples_per_second",
    "step_ms",
    "step_mean_ms",
    "seconds_to_target",
    "samples_to_target",
    "final_metric",
    "final_loss",
)


def throughput(material: Material) -> Html:
    """Bars with intervals, one list a setting."""
    found = [_figure(material, panel, f"throughput-{index}") for index, panel in enumerate(material.panels)]
    lead = (
        f"{material.goal.samples.capitalize()} a second after warm-up, medians over seeds; the whisker"
        f" {interval_words(material.findings.seeds)}. Fast steps are worth nothing that need more samples to"
        " get there, so the way to the target stands below each bar."
    )
    notes = [element("p", note) for note in uneven(material.findings)]
    return section(
        "throughput", "Throughput, and what it was good for", lead, *notes, folded(found, "setting")
    )


def _figure(material: Material, panel: Panel, name: str) -> Html:
    drawn = bars([_bar(material, entry) for entry in panel.entries])
    heads = [Column("row"), *(Column(material.figures[each].head) for each in TOLD), Column("seeds")]
    told = table(
        f"Throughput and progress with {panel.title}",
        heads,
        [_line(material, each) for each in panel.entries],
    )
    numbers = element("details", element("summary", "Numbers: ", panel.title), told)
    head = element("figcaption", element("h3", panel.title))
    return element("figure", head, drawn, numbers, id=name)


def _bar(material: Material, entry: Entry) -> Bar:
    speed = entry.number("samples_per_second")
    figure = material.figures["samples_per_second"]
    value = "speed withheld" if entry.withheld else "not measured"
    if speed is not None:
        value = f"{figure.interval(speed)} {figure.unit}"
    return Bar(material.marks[entry.row], material.label(entry), value, speed, _note(material, entry))


def _note(material: Material, entry: Entry) -> str:
    """Time to target and final measure, with what there is of them."""
    figures, target, parts = material.figures, material.goal.target, []
    reached = entry.number("seconds_to_target")
    if target is not None and reached is not None:
        missed = len(entry.seeds) - reached.seeds
        parts.append(f"{target:g} reached after {figures['seconds_to_target'].interval(reached)} s")
        parts += [f"but not in {missed} of {len(entry.seeds)} seeds"] if missed else []
    elif target is not None and entry.withheld is None:
        parts.append(f"{target:g} not reached")
    final = entry.number("final_metric")
    parts += [f"{material.goal.title} {figures['final_metric'].interval(final)} at the end"] if final else []
    parts += [f"failed: {entry.failed}"] if entry.failed else []
    return ", ".join([*parts, *(["one seed"] if len(entry.seeds) == 1 else [])])


def _line(material: Material, entry: Entry) -> list[str | Html]:
    told: list[str | Html] = [material.figures[each].interval(entry.number(each)) for each in TOLD]
    return [material.label(entry), *told, str(len(entry.seeds))]
