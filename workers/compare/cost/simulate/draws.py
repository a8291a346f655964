"""Draws: extra seconds of each worker's steps under a straggler; seeded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hubring.workers.slowdown.delays import SLOW_SHARE, Slowness
from hubring.workers.slowdown.straggler import Straggler

Array = NDArray[np.float64]
Ranks = NDArray[np.intp]

EXACT_WORKERS = 16
"""Up to so many workers have the very delays of an experiment's runs with that seed; these draws are slow."""

_HOST_STEPS = 4000
"""Steps after which a slow host's draws repeat."""


class Draws:
    """Extra seconds of the experiment's delays: the same numbers for few workers, else their distribution.

    Args:
        straggler: The slow workers; None: none.
        workers: Number of workers.
        seed: The same seed gives the same draws in the same order.
    """

    def __init__(self, straggler: Straggler | None, workers: int, seed: int) -> None:
        self._straggler = straggler
        self._random = np.random.default_rng(seed)
        self._slow = np.zeros(workers, bool)
        if straggler is not None:
            self._slow[list(straggler.ranks) or slice(None)] = True
        slowness, few = Slowness(straggler, seed=seed), workers <= EXACT_WORKERS
        self._exact = [slowness.of(rank) for rank in range(workers)] if few and straggler else []
        self._host_is_slow = self._random.random(_HOST_STEPS) < SLOW_SHARE

    def take(self, ranks: Ranks, steps: Ranks) -> Array:
        """Returns the extra seconds of each of these ranks in its own step.

        Args:
            ranks: Ranks, [n].
            steps: Completed steps of each, [n].
        """
        straggler, slow = self._straggler, self._slow[ranks]
        extra = np.zeros(len(ranks))
        if self._exact:
            pairs = zip(ranks, steps, strict=True)
            return np.array([self._exact[rank].lateness(int(step)) for rank, step in pairs], float)
        if straggler is None or not slow.any():
            return extra
        if straggler.kind == "constant":
            extra[slow] = straggler.seconds
        elif straggler.kind == "host":
            extra[slow] = self._host_is_slow[steps[slow] % _HOST_STEPS] * straggler.seconds / SLOW_SHARE
        else:  # Lomax: a Pareto distribution that starts at 0, with mean scale / (shape - 1)
            drawn = self._random.pareto(straggler.shape, int(slow.sum()))
            extra[slow] = straggler.seconds * (straggler.shape - 1) * drawn
        return extra
