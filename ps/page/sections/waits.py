"""Who waits for whom, and how long."""

from __future__ import annotations

from hubring.ps.markup import Html, element
from hubring.ps.page.chart import bar
from hubring.ps.page.figures import NOTHING
from hubring.ps.page.memo import Memo
from hubring.ps.page.moment import Moment, Worker
from hubring.ps.page.section import Section
from hubring.ps.page.table import headed, row, table

HEADS = ("Rank", "Held up now", "Answers held back, lately", "Seconds a second")
HEADS_ON_RING = HEADS[:2]

_ON_HUB = (
    "A shard holds an answer back until the mode lets its worker go on: when the slowest have come. So"
    " those with long bars wait, and those with the shortest are waited for."
)
_ON_RING = "Around the ring nobody holds answers: each worker tells for how long it has been held up."


def waits(moment: Moment, memo: Memo) -> Section:
    """One row a worker that takes part."""
    present = moment.present
    longest = max((each.holding for each in present), default=0.0)
    rows = {
        f"wait-{each.rank}": memo(f"wait-{each.rank}", _row, *_shown(each, longest), moment.on_ring)
        for each in present
    }
    words = element("p", _ON_RING if moment.on_ring else _ON_HUB, class_="soft")
    heads = HEADS_ON_RING if moment.on_ring else HEADS
    inner = table("waits-table", "Waiting by rank", heads) if rows else None
    return Section(headed("waits", "Who waits for whom", element("p", _who(moment)), words, inner), rows)


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


def _row(rank: int, waiting: int, share: float, holding: str, on_ring: bool) -> Html:
    now = f"{waiting} s" if waiting else NOTHING
    told = () if on_ring else (bar(share, "held"), holding)
    return row(str(rank), now, *told, name=f"wait-{rank}")
