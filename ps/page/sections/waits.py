"""Who waits for whom, and how long."""

from __future__ import annotations

from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Snapshot, Worker

_MACROS = TEMPLATES.macros("waits.html")


def waits(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """One row a worker that takes part."""
    present = snapshot.present
    longest = max((each.holding for each in present), default=0.0)
    rows = {
        f"wait-{each.rank}": cache(f"wait-{each.rank}", _MACROS.row, *_shown(each, longest), snapshot.on_ring)
        for each in present
    }
    return Section(cache("waits", _MACROS.section, _who(snapshot), snapshot.on_ring, bool(rows)), rows)


def _who(snapshot: Snapshot) -> str:
    waiting = [each for each in snapshot.present if each.state == "held up"]
    if snapshot.silent:
        silent = ", ".join(str(each.rank) for each in snapshot.silent)
        return f"Silent, so that others may wait for it: rank {silent}."
    if not waiting:
        return "Nobody has been held up for long."
    ranks = ", ".join(str(each.rank) for each in waiting)
    return f"Held up: rank {ranks}. The slowest: {snapshot.report['slowest'] or 'nobody; all wait'}."


def _shown(worker: Worker, longest: float) -> tuple[int, int, float, str]:
    """In steps that can be seen, so that a row is made anew only where that changes."""
    share = worker.holding / longest if longest else 0.0
    return worker.rank, int(worker.waiting), round(20 * share) / 20, f"{worker.holding:.2f}"
