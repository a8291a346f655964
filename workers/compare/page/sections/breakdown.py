"""The parts of a step's time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from hubring.ps.page.kit.figures import NOTHING, digits
from hubring.workers.compare.page.figure import Figure, Label, Table
from hubring.workers.compare.page.mark import Mark
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.page.panel import Panel
from hubring.workers.compare.result.findings import Entry

COLUMNS = ("step_ms", "compute_ms", "exposed_ms", "hidden_ms", "read_wait_ms", "queue_ms", "apply_ms")
THICK = {
    "compute": "compute",
    "exposed": "exposed: waiting for the exchange",
    "read": "waiting for permission to read",
    "other": "other",
}
THIN = {
    "hidden": "exchange that overlaps with compute",
    "queue": "server queue",
    "apply": "server apply",
}
LEGENDS = (("Thick:", THICK, 14), ("Thin:", THIN, 6))
"""Legends of the two bars of every row, with the height of their samples in pixels."""


class Piece(NamedTuple):
    """A part of a stacked bar."""

    kind: str
    at: float
    length: float


class Step(NamedTuple):
    """A row's step; without pieces nothing is drawn."""

    mark: Mark
    label: Label
    value: str
    thick: list[Piece]
    thin: list[Piece]


def breakdown(material: Material) -> dict[str, Any] | None:
    """Returns one stacked bar per row, and a thinner bar below it for what overlaps."""
    shown = [panel for panel in material.panels if any(map(_known, panel.entries))]
    figures = [_figure(material, panel, f"breakdown-{index}") for index, panel in enumerate(shown)]
    title = "Where a step’s time goes"
    return {"title": title, "legends": LEGENDS, "figures": figures} if figures else None


def _known(entry: Entry) -> bool:
    return any(entry.median(each) is not None for each in ("compute_ms", "exposed_ms"))


def _figure(material: Material, panel: Panel, name: str) -> Figure:
    heads = ["row", *(material.figures[each].head for each in COLUMNS)]
    lines = [_line(material, each) for each in panel.entries]
    table = Table(f"Parts of a step with {panel.title}", heads, lines)
    steps = [_step(material, entry) for entry in panel.entries]
    ends = (piece.at + piece.length for step in steps for piece in (*step.thick, *step.thin))
    return Figure(name, panel.title, "", {"steps": steps, "reach": max(ends, default=1.0)}, table)


def _step(material: Material, entry: Entry) -> Step:
    mark, label = material.marks[entry.row], material.label(entry)
    if not _known(entry):
        return Step(mark, label, "withheld" if entry.withheld else "not measured", [], [])
    step = entry.median("step_ms")
    value = NOTHING if step is None else f"{digits(step)} ms per step"
    return Step(mark, label, value, _pieces(entry), _beside(entry))


def _pieces(entry: Entry) -> list[Piece]:
    """Returns the parts of the step. The wait to read is part of the exposed exchange, never more."""
    compute, exposed = entry.median("compute_ms") or 0.0, entry.median("exposed_ms") or 0.0
    read = min(entry.median("read_wait_ms") or 0.0, exposed)
    other = max(0.0, (entry.median("step_ms") or 0.0) - compute - exposed)
    parts = {"compute": compute, "exposed": exposed - read, "read": read, "other": other}
    return _end_to_end(0.0, parts)


def _beside(entry: Entry) -> list[Piece]:
    """Returns what overlaps with the step; when the server's part happens was not measured."""
    start = max(0.0, (entry.median("compute_ms") or 0.0) - (entry.median("hidden_ms") or 0.0))
    return _end_to_end(start, {kind: entry.median(f"{kind}_ms") or 0.0 for kind in THIN})


def _end_to_end(start: float, parts: Mapping[str, float]) -> list[Piece]:
    begins = accumulate(parts.values(), initial=start)
    placed = zip(parts.items(), begins, strict=False)  # `begins` has one more: the end of the last piece
    return [Piece(kind, at, length) for (kind, length), at in placed if length]


def _line(material: Material, entry: Entry) -> list[str | Label]:
    return [material.label(entry), *(material.figures[each].interval(entry.number(each)) for each in COLUMNS)]
