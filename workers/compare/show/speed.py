"""Speed: throughput, always next to time to target and the final metric, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from hubring.ps.page.kit.figures import NOTHING, digits
from hubring.workers.compare.findings import RowResult
from hubring.workers.compare.plan.setting import words
from hubring.workers.compare.show.figures import cells, partial, uneven
from hubring.workers.compare.show.material import DrawnFigure, Label, NumberTable, PageContent, Panel, RowMark
from hubring.workers.compare.statistics import Number, interval_words
from hubring.workers.peers.nccl_tests import NCCL_COLUMNS

COLUMNS = (
    *("samples_per_second", "step_ms", "step_mean_ms", "seconds_to_target", "samples_to_target"),
    *("final_metric", "final_loss"),
)


class Bar(NamedTuple):
    """One row: its value as text and its length; without a length no bar is drawn."""

    mark: RowMark
    label: Label
    value: str
    length: Number | None
    note: str


def throughput(material: PageContent) -> dict[str, Any]:
    """Returns bars with intervals, one list per setting."""
    panels, findings = material.panels, material.findings
    part = partial(entry.number(name) for entry in findings.rows for name in COLUMNS)
    return {
        "title": "Throughput and progress",
        "interval": interval_words(findings.seeds),
        "notes": [*uneven(findings), *filter(None, [part])],
        "figures": [_figure(material, panel, f"throughput-{at}") for at, panel in enumerate(panels)],
    }


def _figure(material: PageContent, panel: Panel, name: str) -> DrawnFigure:
    bars = [bar(material, entry) for entry in panel.entries]
    shown = COLUMNS[:-1] if material.job.metric == "loss" else COLUMNS  # its final value is the loss
    known = material.numbers(f"Throughput and progress with {panel.title}", panel.entries, shown)
    lines = [[*cells, str(len(each.seeds))] for cells, each in zip(known.lines, panel.entries, strict=True)]
    table = NumberTable(known.caption, [*known.heads, "seeds"], lines)
    return DrawnFigure(name, panel.title, "", {"bars": bars, "reach": reach(bars)}, table)


def reach(bars: Sequence[Bar]) -> float:
    """Returns the speed at the end of the scale."""
    return max((each.length.high for each in bars if each.length), default=1.0) or 1.0


def bar(material: PageContent, entry: RowResult) -> Bar:
    """Returns the bar of one row."""
    speed = entry.number("samples_per_second")
    figure = material.figures["samples_per_second"]
    value = "speed withheld" if entry.withheld else "not measured"
    if speed is not None:
        value = f"{figure.interval(speed)} {figure.unit}"
    return Bar(material.marks[entry.row], material.label(entry), value, speed, _note(material, entry))


def _note(material: PageContent, entry: RowResult) -> str:
    """Returns time to target and final metric, as far as known."""
    figures, target, parts = material.figures, material.job.target, []
    reached = entry.number("seconds_to_target")
    if target is not None and reached is not None:
        missed = len(entry.seeds) - reached.seeds
        parts.append(f"{target:g} reached after {figures['seconds_to_target'].span(reached)} s")
        parts += [f"but not in {missed} of {len(entry.seeds)} seeds"] if missed else []
    elif target is not None and entry.withheld is None:
        parts.append(f"{target:g} not reached")
    final = entry.number("final_metric")
    parts += [f"{material.job.title} {figures['final_metric'].interval(final)} at the end"] if final else []
    parts += [f"failed: {entry.failed}"] if entry.failed else []
    return ", ".join([*parts, *(["one seed"] if len(entry.seeds) == 1 else [])])


STEP_COLUMNS = ("step_ms", "compute_ms", "exposed_ms", "hidden_ms", "read_wait_ms", "queue_ms", "apply_ms")
THICK = {
    "compute": "compute",
    "exposed": "exposed: waiting for the exchange",
    "read": "waiting for permission to read",
    "other": "other",
}
THIN = {"hidden": "exchange that overlaps with compute", "queue": "server queue", "apply": "server apply"}
LEGENDS = (("Thick:", THICK, 14), ("Thin:", THIN, 6))
"""Legends of the two bars of every row, with the height of their samples in pixels."""


class Piece(NamedTuple):
    """A part of a stacked bar."""

    kind: str
    at: float
    length: float


class StepBar(NamedTuple):
    """A row's step; without pieces nothing is drawn."""

    mark: RowMark
    label: Label
    value: str
    thick: list[Piece]
    thin: list[Piece]


def breakdown(material: PageContent) -> dict[str, Any] | None:
    """Returns one stacked bar per row, and a thinner bar below it for what overlaps."""
    shown = [panel for panel in material.panels if any(map(_known, panel.entries))]
    figures = [_step_figure(material, panel, f"breakdown-{index}") for index, panel in enumerate(shown)]
    title = "Where a step’s time goes"
    return {"title": title, "legends": LEGENDS, "figures": figures} if figures else None


def _known(entry: RowResult) -> bool:
    return any(entry.median(each) is not None for each in ("compute_ms", "exposed_ms"))


def _step_figure(material: PageContent, panel: Panel, name: str) -> DrawnFigure:
    table = material.numbers(f"Parts of a step with {panel.title}", panel.entries, STEP_COLUMNS)
    steps = [_step(material, entry) for entry in panel.entries]
    ends = (piece.at + piece.length for step in steps for piece in (*step.thick, *step.thin))
    return DrawnFigure(name, panel.title, "", {"steps": steps, "reach": max(ends, default=1.0)}, table)


def _step(material: PageContent, entry: RowResult) -> StepBar:
    mark, label = material.marks[entry.row], material.label(entry)
    if not _known(entry):
        return StepBar(mark, label, "withheld" if entry.withheld else "not measured", [], [])
    step = entry.median("step_ms")
    value = NOTHING if step is None else f"{digits(step)} ms per step"
    return StepBar(mark, label, value, _pieces(entry), _beside(entry))


def _pieces(entry: RowResult) -> list[Piece]:
    """Returns the parts of the step. The wait to read is part of the exposed exchange, never more."""
    compute, exposed = entry.median("compute_ms") or 0.0, entry.median("exposed_ms") or 0.0
    read = min(entry.median("read_wait_ms") or 0.0, exposed)
    other = max(0.0, (entry.median("step_ms") or 0.0) - compute - exposed)
    parts = {"compute": compute, "exposed": exposed - read, "read": read, "other": other}
    return _end_to_end(0.0, parts)


def _beside(entry: RowResult) -> list[Piece]:
    """Returns what overlaps with the step; when the server's part happens was not measured."""
    start = max(0.0, (entry.median("compute_ms") or 0.0) - (entry.median("hidden_ms") or 0.0))
    return _end_to_end(start, {kind: entry.median(f"{kind}_ms") or 0.0 for kind in THIN})


def _end_to_end(start: float, parts: Mapping[str, float]) -> list[Piece]:
    begins = accumulate(parts.values(), initial=start)
    placed = zip(parts.items(), begins, strict=False)  # `begins` has one more: the end of the last piece
    return [Piece(kind, at, length) for (kind, length), at in placed if length]


def bandwidth(material: PageContent) -> dict[str, Any] | None:
    """Returns the table, if exchanges were timed."""
    found = material.findings.bandwidth
    if not found:
        return None
    heads = ("row", "setting", *NCCL_COLUMNS)
    lines = [[material.name_under(each.row, [each.setting]), each.setting, *cells(each)] for each in found]
    table = NumberTable("Exchanges in the columns of nccl-tests", heads, lines, words=("setting",))
    return {"title": "Bandwidth in the columns of nccl-tests", "table": table}


def numbers(material: PageContent) -> dict[str, Any] | None:
    """Returns one wide table and the meaning of its names, without columns that have no value."""
    findings, figures = material.findings, material.figures
    shown = [name for name in figures if any(each.number(name) is not None for each in findings.rows)]
    if not shown:
        return None
    known = material.numbers("All numbers: median over seeds, and its interval", findings.rows, shown)
    (row, *heads), pairs = known.heads, zip(findings.rows, known.lines, strict=True)
    lines = [[label, each.setting, *cells] for each, (label, *cells) in pairs]
    rows = {each.row: each.about for each in findings.rows if each.about}
    settings = {key: words(findings.setting(key)) for key in findings.setting_keys}
    return {
        "title": "All numbers",
        "interval": interval_words(findings.seeds),
        "partial": partial(each.number(name) for each in findings.rows for name in shown),
        "meanings": [terms for terms in (rows, settings) if terms],
        "table": NumberTable(known.caption, [row, "setting", *heads], lines, ("setting",)),
    }
