"""How a job ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """How a job ended, for the server's last line."""

    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    broke: bool = False
    """The job failed. Some workers may have finished before."""
    erred: bool = False
    """A worker failed before the job did: its script raised an error. A restart does not help."""
    departures: Counter[str] = field(default_factory=Counter)
    """Departures by the field names above. A rank that is lost twice counts twice."""

    def leave(self, way: str, rank: int, text: str = "") -> None:
        """Records that a worker left.

        Args:
            way: One of the field names above.
            rank: The worker's rank.
            text: Why the worker failed or was lost.
        """
        self.departures[way] += 1
        known = getattr(self, way)
        if isinstance(known, dict):
            known[rank] = text
        elif rank not in known:
            known.append(rank)

    @property
    def ok(self) -> bool:
        return bool(self.finished) and not self.broke

    @property
    def was_preempted(self) -> bool:
        """Whether the job stopped on request, and for no other reason."""
        return bool(self.preempted) and not (self.finished or self.failed or self.broke)
