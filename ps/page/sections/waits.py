"""The section with waiting times by rank."""

from __future__ import annotations

from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Snapshot, Worker

_MACROS = TEMPLATES.macros("waits.html")


def waits(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders one row per worker in the job."""
    present = snapshot.present
    longest = max((each.holding for each in present), default=0.0)
    rows = {
        f"wait-{each.rank}": cache(f"wait-{each.rank}", _MACROS.row, *_shown(each, longest), snapshot.on_ring)
        for each in present
    }
    return Section(cache("waits", _MACROS.section, _who(snapshot), snapshot.on_ring, bool(rows)), rows)


def _who(snapshot: Snapshot) -> str:
    waiting = [each for each in snapshot.present if each.state == "blocked"]
    if snapshot.silent:
        silent = ", ".join(str(each.rank) for each in snapshot.silent)
        return f"Silent, so other workers may be waiting for it: rank {silent}."
    if not waiting:
        return "No worker is blocked."
    ranks = ", ".join(str(each.rank) for each in waiting)
    return f"Blocked: rank {ranks}. Slowest worker: {snapshot.report['slowest'] or 'none; all are blocked'}."


def _shown(worker: Worker, longest: float) -> tuple[int, int, float, str]:
    """Returns a row's values, rounded so that the row is rendered only on a visible change."""
    share = worker.holding / longest if longest else 0.0
    return worker.rank, int(worker.waiting), round(20 * share) / 20, f"{worker.holding:.2f}"
