"""Workers that wait for each other without end, because they are in different operations.

Law: a job stands still if every member waits, and they wait in at least two operations. A worker says of its
operation that it is held if other workers must take part, and nothing of it is on its way. If all are held,
and stay so while workers ask again, they can never meet. All waits must have one moment in common, since
workers report at different times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.job.membership import NAMED_RANKS
from hubring.ps.job.telemetry import Progress

SURE_SECONDS = 7.0
"""How long all must be held. A worker asks its shards every 5 or 6 s whether an answer is on its way."""

log = logging.getLogger(__name__)

FIX = "Call the same operations on all ranks, in the same order"
FIRST_MEANS = "first gradients"
"""In the names of the operations in which ranks wait after the backward passes of their first step."""
FIRST_FIX = ". In the first step, all ranks must run backward equally often"


class Standstill:
    """Watches the last report of each member.

    Args:
        tell: Called once with what each member is in, when they have come to stand still.
        fail: Called if they can never meet.
    """

    def __init__(self, tell: Callable[[str], None], fail: Callable[[HubringError], None]) -> None:
        self._tell, self._fail = tell, fail
        self._told = False
        self._held_from: float | None = None

    def look(self, progress: Mapping[int, Progress], now: float) -> None:
        """Looks at the members' reports, by rank."""
        sent = [one.telemetry for one in progress.values()]
        began = max((one.heard - one.waiting for one in progress.values()), default=0.0)
        meet = began < min((one.heard for one in progress.values()), default=0.0)
        if not (meet and all(one.operation for one in sent) and len({one.operation for one in sent}) > 1):
            self._told, self._held_from = False, None
            return
        if not all(one.held for one in sent):
            self._held_from = None
        elif self._held_from is None:
            self._held_from = now
        elif now - self._held_from >= SURE_SECONDS:
            self._fail(ConfigError(_text(progress)))
        if not self._told:
            self._told = True
            text = _text(progress)
            log.warning("%s", text)
            self._tell(text)


def _text(progress: Mapping[int, Progress]) -> str:
    first = any(FIRST_MEANS in one.telemetry.operation for one in progress.values())
    return (
        f"all workers wait, in different operations: {_listed(progress)}. {FIX}{FIRST_FIX if first else ''}"
    )


def _listed(progress: Mapping[int, Progress]) -> str:
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, one in progress.items():
        ranks.setdefault((one.telemetry.operation, one.telemetry.place), []).append(rank)
    parts = []
    for (operation, place), some in ranks.items():
        names = f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some[:NAMED_RANKS]))}"
        more = " and more" if len(some) > NAMED_RANKS else ""
        where = f" ({place})" if place else ""
        parts.append(f"{names}{more} for {progress[some[0]].waiting:.0f} s in {operation}{where}")
    return "; ".join(parts)
