"""Who waits for whom under bounded staleness, as times instead of events."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hubring.workers.compare.cost.simulate.draws import Array, Ranks

GONE = np.iinfo(np.intp).max // 2
"""Steps of a worker for which nobody waits any more."""


class Pushes(NamedTuple):
    """Gradients that were applied.

    Attributes:
        ranks: Whose, [n].
        heads: When each one's first slice was applied, s.
        tails: When each one's last slice was, s.
    """

    ranks: Ranks
    heads: Array
    tails: Array

    def where(self, chosen: NDArray[np.bool_]) -> Pushes:
        return Pushes(self.ranks[chosen], self.heads[chosen], self.tails[chosen])

    def not_before(self, head: float, tail: float) -> Pushes:
        """The same, answered at that moment if they were applied before it."""
        late = self.tails < tail
        return Pushes(
            self.ranks,
            np.where(late, np.maximum(self.heads, head), self.heads),
            np.where(late, tail, self.tails),
        )


class Staleness:
    """SSP's rule (Ho et al., NIPS 2013): who has pushed c gradients reads once all have pushed c - s.

    s = 0 is bsp's bound; None is asp, where nobody waits.

    Args:
        workers: How many.
        bound: The s.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self.counts = np.zeros(workers, np.intp)
        """Gradients that were applied, by worker."""
        self._bound = bound
        self._slowest = 0
        self._held = np.zeros(workers, bool)
        self._heads, self._tails = np.zeros(workers), np.zeros(workers)

    def apply(self, pushes: Pushes) -> Pushes:
        """Counts these, at most one of each worker; returns what may be answered, earlier ones too."""
        self.counts[pushes.ranks] += 1
        if self._bound is None:
            return pushes
        self._heads[pushes.ranks], self._tails[pushes.ranks] = pushes.heads, pushes.tails
        self._held[pushes.ranks] = True
        free = pushes.where(self.counts[pushes.ranks] - self._bound <= self._slowest)
        self._held[free.ranks] = False
        return self._joined(free, self._advance(pushes))

    def forget(self, rank: int, now: float) -> Pushes:
        """Waits for that worker no more; returns what may be answered for that."""
        self.counts[rank], self._held[rank] = GONE, False
        return self._released(now, now)

    def _advance(self, pushes: Pushes) -> Pushes:
        """What may be answered since the slowest have pushed."""
        were_slowest = self.counts[pushes.ranks] == self._slowest + 1
        if self.counts.min() == self._slowest or not were_slowest.any():
            return pushes.where(np.zeros(len(pushes.ranks), bool))
        last = np.flatnonzero(were_slowest)[np.argmax(pushes.tails[were_slowest])]
        return self._released(float(pushes.heads[last]), float(pushes.tails[last]))

    def _released(self, head: float, tail: float) -> Pushes:
        self._slowest = int(self.counts.min())
        ranks = np.flatnonzero(self._held & (self.counts - (self._bound or 0) <= self._slowest))
        self._held[ranks] = False
        return Pushes(ranks, self._heads[ranks], self._tails[ranks]).not_before(head, tail)

    @staticmethod
    def _joined(first: Pushes, second: Pushes) -> Pushes:
        return Pushes(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))
