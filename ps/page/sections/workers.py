"""The section with a table of the workers."""

from __future__ import annotations

from markupsafe import Markup

from hubring.ps.page.kit.figures import NOTHING, grouped, loss, number
from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Snapshot, State, Worker

_MACROS = TEMPLATES.macros("workers.html")


def workers(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders one row per rank."""
    rows = {f"worker-{each.rank}": _row(each, cache) for each in snapshot.workers}
    return Section(cache("workers", _MACROS.section, bool(rows)), rows)


def _row(worker: Worker, cache: MarkupCache) -> Markup:
    figures = [NOTHING] * 3
    if worker.present:
        figures = [grouped(worker.step), number(worker.rate), loss(worker.loss)]
    shown = worker.rank, kind(worker.state), worker.doing, worker.where or NOTHING, *figures
    return cache(f"worker-{worker.rank}", _MACROS.row, *shown)


def kind(state: State) -> str:
    """Returns the CSS class that sets a state's colour."""
    return f"is-{state.replace(' ', '-')}"
