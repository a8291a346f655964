"""Where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping

from hubring.ps.markup import Html, element
from hubring.workers.compare.figures import NOTHING, digits
from hubring.workers.compare.findings import Entry
from hubring.workers.compare.page.chart import Column, table
from hubring.workers.compare.page.chart_bars import Piece, headline, stack
from hubring.workers.compare.page.material import Material, folded, section
from hubring.workers.compare.page.panel import Panel

TOLD = ("step_ms", "compute_ms", "exposed_ms", "hidden_ms", "read_wait_ms", "queue_ms", "apply_ms")
THICK = {
    "compute": "compute",
    "exposed": "exposed: waiting for the exchange",
    "read": "waiting to be allowed to read",
    "other": "all else",
}
THIN = {
    "hidden": "exchange hidden behind compute",
    "queue": "queue at the server",
    "apply": "apply at the server",
}


def breakdown(material: Material) -> Html | None:
    """One stacked bar a row, and below it, thinner, what happens meanwhile."""
    shown = [panel for panel in material.panels if any(map(_known, panel.entries))]
    if not shown:
        return None
    lead = (
        "The thick bar is the step as a worker lives it, in milliseconds, medians over seeds. The thin one"
        " below is what goes on meanwhile and costs the worker nothing unless it grows: exchange behind"
        " compute, and the server’s queue and apply."
    )
    found = [_figure(material, panel, f"breakdown-{index}") for index, panel in enumerate(shown)]
    keys = (_key("Thick:", THICK, 14), _key("Thin:", THIN, 6))
    return section("breakdown", "Where a step’s time goes", lead, *keys, folded(found, "setting"))


def _known(entry: Entry) -> bool:
    return any(entry.median(each) is not None for each in ("compute_ms", "exposed_ms"))


def _key(title: str, meanings: Mapping[str, str], height: int) -> Html:
    items = (element("li", _patch(kind, height), " ", meaning) for kind, meaning in meanings.items())
    return element("ul", element("li", title), *items, class_="key")


def _patch(kind: str, height: int) -> Html:
    size = {"width": 18, "height": height}
    hatch = element("rect", **size, class_="hatched") if kind == "read" else None
    return element("svg", element("rect", **size, class_=f"piece {kind}"), hatch, **size, aria_hidden="true")


def _figure(material: Material, panel: Panel, name: str) -> Html:
    reach = max(_reach(entry) for entry in panel.entries) or 1.0
    items = (_item(material, entry, reach) for entry in panel.entries)
    heads = [Column("row"), *(Column(material.figures[each].head) for each in TOLD)]
    told = table(
        f"Parts of a step with {panel.title}", heads, [_line(material, each) for each in panel.entries]
    )
    numbers = element("details", element("summary", "Numbers: ", panel.title), told)
    head = element("figcaption", element("h3", panel.title))
    return element("figure", head, element("ol", *items, class_="bars"), numbers, id=name)


def _item(material: Material, entry: Entry, reach: float) -> Html:
    mark, label = material.marks[entry.row], material.label(entry)
    if not _known(entry):
        return element("li", headline(mark, label, "withheld" if entry.withheld else "not measured"))
    step = entry.median("step_ms")
    value = NOTHING if step is None else f"{digits(step)} ms a step"
    below = _beside(entry)
    start = max(0.0, (entry.median("compute_ms") or 0.0) - (entry.median("hidden_ms") or 0.0))
    thin = stack(below, start, reach, 6, mark) if below else None
    return element("li", headline(mark, label, value), stack(_pieces(entry), 0.0, reach, 16, mark), thin)


def _pieces(entry: Entry) -> list[Piece]:
    """The step: compute, then what it waits for; reading is part of that and never more."""
    compute, exposed = entry.median("compute_ms") or 0.0, entry.median("exposed_ms") or 0.0
    read = min(entry.median("read_wait_ms") or 0.0, exposed)
    other = max(0.0, (entry.median("step_ms") or 0.0) - compute - exposed)
    parts = {"compute": compute, "exposed": exposed - read, "read": read, "other": other}
    return [Piece(kind, length) for kind, length in parts.items() if length]


def _beside(entry: Entry) -> list[Piece]:
    """What goes on meanwhile; where in the step the server's part lies was not measured."""
    names = {"hidden": "hidden_ms", "queue": "queue_ms", "apply": "apply_ms"}
    return [Piece(kind, length) for kind, name in names.items() if (length := entry.median(name))]


def _reach(entry: Entry) -> float:
    compute, hidden = entry.median("compute_ms") or 0.0, entry.median("hidden_ms") or 0.0
    below = max(0.0, compute - hidden) + sum(piece.length for piece in _beside(entry))
    return max(sum(piece.length for piece in _pieces(entry)), below)


def _line(material: Material, entry: Entry) -> list[str | Html]:
    return [material.label(entry), *(material.figures[each].interval(entry.number(each)) for each in TOLD)]
