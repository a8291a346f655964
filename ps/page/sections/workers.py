"""The section with a table of the workers."""

from __future__ import annotations

from markupsafe import Markup

from hubring.ps.page.kit.figures import NOTHING, grouped, loss, number, size
from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Snapshot, State, Worker

_MACROS = TEMPLATES.macros("workers.html")


def workers(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders one row per rank."""
    rows = {f"worker-{each.rank}": _row(each, cache) for each in snapshot.workers}
    return Section(cache("workers", _MACROS.section, bool(rows)), rows)


def _row(worker: Worker, cache: MarkupCache) -> Markup:
    figures = (NOTHING,) * 7
    if worker.present:
        samples = NOTHING if worker.samples is None else number(worker.samples)
        speed = grouped(worker.step), number(worker.rate), samples, loss(worker.loss)
        figures = *speed, *usage(worker.cores, worker.memory, worker.gpu)
    shown = worker.rank, kind(worker.state), worker.doing, worker.replace, figures, worker.where or NOTHING
    return cache(f"worker-{worker.rank}", _MACROS.row, *shown)


def usage(cores: float, memory: int, gpu: int) -> tuple[str, str, str]:
    """Returns the cells of a process's CPU, memory and GPU memory."""
    return f"{cores:.2f}", size(memory) if memory else NOTHING, size(gpu) if gpu else NOTHING


def kind(state: State) -> str:
    """Returns the CSS class that sets a state's colour."""
    return f"is-{state.replace(' ', '-')}"
