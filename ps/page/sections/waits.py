"""Who waits for whom, and how long."""

from __future__ import annotations

from hubring.ps.page.markup_cache import Memo
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Moment, Worker

_MACROS = TEMPLATES.macros("waits.html")


def waits(moment: Moment, memo: Memo) -> Section:
    """One row a worker that takes part."""
    present = moment.present
    longest = max((each.holding for each in present), default=0.0)
    rows = {
        f"wait-{each.rank}": memo(f"wait-{each.rank}", _MACROS.row, *_shown(each, longest), moment.on_ring)
        for each in present
    }
    return Section(memo("waits", _MACROS.section, _who(moment), moment.on_ring, bool(rows)), rows)


def _who(moment: Moment) -> str:
    waiting = [each for each in moment.present if each.state == "held up"]
    if moment.silent:
        silent = ", ".join(str(each.rank) for each in moment.silent)
        return f"Silent, so that others may wait for it: rank {silent}."
    if not waiting:
        return "Nobody has been held up for long."
    ranks = ", ".join(str(each.rank) for each in waiting)
    return f"Held up: rank {ranks}. The slowest: {moment.report['slowest'] or 'nobody; all wait'}."


def _shown(worker: Worker, longest: float) -> tuple[int, int, float, str]:
    """In steps that can be seen, so that a row is made anew only where that changes."""
    share = worker.holding / longest if longest else 0.0
    return worker.rank, int(worker.waiting), round(20 * share) / 20, f"{worker.holding:.2f}"
