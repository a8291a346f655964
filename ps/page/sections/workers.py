"""Every worker, in numbers."""

from __future__ import annotations

from functools import lru_cache

from hubring.ps.markup import Html, element
from hubring.ps.page.figures import NOTHING, loss, number
from hubring.ps.page.memo import Memo
from hubring.ps.page.moment import Moment, State, Worker
from hubring.ps.page.section import Section
from hubring.ps.page.table import headed, row, table

HEADS = ("Rank", "State", "Step", "Steps/s", "Loss", "Host and process")


def workers(moment: Moment, memo: Memo) -> Section:
    """One row a place."""
    rows = {f"worker-{each.rank}": _row(each, memo) for each in moment.workers}
    inner = table("workers-table", "Workers by rank", HEADS)
    return Section(headed("workers", "Workers", inner if rows else _none()), rows)


def _none() -> Html:
    return element("p", "Nobody has come yet, nor said how many there will be.", class_="soft")


def _row(worker: Worker, memo: Memo) -> Html:
    told = (worker.step, worker.rate, worker.loss) if worker.present else None
    return memo(f"worker-{worker.rank}", _made, worker.rank, worker.state, worker.doing, worker.where, told)


def _made(
    rank: int, state: State, doing: str, where: str, told: tuple[int, float, float | None] | None
) -> Html:
    step, rate, lost = told or (None, None, None)
    return row(
        str(rank),
        _standing(doing, state),
        NOTHING if step is None else f"{step:,}",
        NOTHING if rate is None else number(rate),
        loss(lost),
        where or NOTHING,
        name=f"worker-{rank}",
    )


@lru_cache(maxsize=256)
def _standing(doing: str, state: State) -> Html:
    return element("span", doing, class_=f"state {kind(state)}")


def kind(state: State) -> str:
    """The class that sets a state's colour."""
    return f"is-{state.replace(' ', '-')}"
