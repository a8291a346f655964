"""Waiting under bounded staleness, as times instead of events."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hubring.workers.compare.cost.simulate.draws import Array, Ranks

GONE = np.iinfo(np.intp).max // 2
"""Step count of a lost worker, for which no worker waits."""


class Pushes(NamedTuple):
    """Applied gradients.

    Attributes:
        ranks: Ranks, [n].
        heads: When each gradient's first slice was applied, s.
        tails: When each gradient's last slice was applied, s.
    """

    ranks: Ranks
    heads: Array
    tails: Array

    def where(self, chosen: NDArray[np.bool_]) -> Pushes:
        return Pushes(self.ranks[chosen], self.heads[chosen], self.tails[chosen])

    def not_before(self, head: float, tail: float) -> Pushes:
        """Returns the pushes with answers no earlier than this moment."""
        late = self.tails < tail
        return Pushes(
            self.ranks,
            np.where(late, np.maximum(self.heads, head), self.heads),
            np.where(late, tail, self.tails),
        )


class Staleness:
    """SSP's rule (Ho et al., NIPS 2013): a worker that pushed c gradients reads once all have pushed c - s.

    s = 0 is bsp's bound; None is asp, where no worker waits.

    Args:
        workers: Number of workers.
        bound: The s.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self.counts = np.zeros(workers, np.intp)
        """Applied gradients by worker."""
        self._bound = bound
        self._slowest = 0
        self._held = np.zeros(workers, bool)
        self._heads, self._tails = np.zeros(workers), np.zeros(workers)

    def apply(self, pushes: Pushes) -> Pushes:
        """Counts pushes, at most one per worker; returns those that can be answered, with earlier ones."""
        self.counts[pushes.ranks] += 1
        if self._bound is None:
            return pushes
        self._heads[pushes.ranks], self._tails[pushes.ranks] = pushes.heads, pushes.tails
        self._held[pushes.ranks] = True
        free = pushes.where(self.counts[pushes.ranks] - self._bound <= self._slowest)
        self._held[free.ranks] = False
        return self._joined(free, self._advance(pushes))

    def forget(self, rank: int, now: float) -> Pushes:
        """Stops waiting for a worker; returns the pushes that can now be answered."""
        self.counts[rank], self._held[rank] = GONE, False
        return self._released(now, now)

    def _advance(self, pushes: Pushes) -> Pushes:
        """Returns the pushes that can be answered because the slowest worker has pushed."""
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
