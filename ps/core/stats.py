"""What a shard counts."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

RUNS_KEPT = 1000
"""Backup workers leave somebody out of every round: old runs make room for new ones."""


@dataclass(slots=True)
class PartialRounds:
    """Consecutive rounds of one key with the same contributors.

    `first` and `last` are the versions that these rounds updated.
    """

    key: int
    first: int
    last: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Stats:
    """Counts since the job began.

    Attributes:
        pushes: Gradients that counted, or will when their round closes.
        duplicates: Pushes that were known already.
        dropped: Pushes too late for their round.
        keys: Slices that the shard holds.
        oldest: Lowest version of any key; 0 where there is none.
        newest: Highest version of any key, likewise.
        staleness: How many pushes were applied at each staleness.
        partial: Rounds that closed without all who began the job.
    """

    pushes: int = 0
    duplicates: int = 0
    dropped: int = 0
    keys: int = 0
    oldest: int = 0
    newest: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    partial: deque[PartialRounds] = field(default_factory=lambda: deque(maxlen=RUNS_KEPT))
    _latest: dict[int, PartialRounds] = field(default_factory=dict)

    def note_partial(self, key: int, version: int, ranks: tuple[int, ...]) -> None:
        """Records one round, in the last run of its key where it goes on."""
        run = self._latest.get(key)
        if run is not None and run.last == version - 1 and run.ranks == ranks:
            run.last = version
            return
        self._latest[key] = run = PartialRounds(key, version, version, ranks)
        self.partial.append(run)
