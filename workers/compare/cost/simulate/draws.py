"""Draws: how much longer each step of each worker takes under a straggler; seeded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hubring.workers.slowdown.straggler import Straggler

Array = NDArray[np.float64]
Ranks = NDArray[np.intp]

SLOW_SHARE = 0.1
"""How many of its steps a slow host is slow in, as in `hubring.workers.slowdown.delays`."""

_HOST_STEPS = 4000
"""A slow host's draws repeat after so many steps."""


class Draws:
    """Extra seconds, distributed as the experiment's own delays are, but not the same numbers.

    Args:
        straggler: Who is slow, and how; None: nobody.
        workers: How many there are.
        seed: The same seed gives the same draws in the same order.
    """

    def __init__(self, straggler: Straggler | None, workers: int, seed: int) -> None:
        self._straggler = straggler
        self._random = np.random.default_rng(seed)
        self._slow = np.zeros(workers, bool)
        if straggler is not None:
            self._slow[list(straggler.ranks) or slice(None)] = True
        self._host_is_slow = self._random.random(_HOST_STEPS) < SLOW_SHARE

    def take(self, ranks: Ranks, steps: Ranks) -> Array:
        """Extra seconds of each of these ranks in its own step.

        Args:
            ranks: Which, [n].
            steps: How many each has taken before, [n].
        """
        straggler, slow = self._straggler, self._slow[ranks]
        extra = np.zeros(len(ranks))
        if straggler is None or not slow.any():
            return extra
        if straggler.kind == "constant":
            extra[slow] = straggler.seconds
        elif straggler.kind == "host":
            extra[slow] = self._host_is_slow[steps[slow] % _HOST_STEPS] * straggler.seconds / SLOW_SHARE
        else:  # Lomax: a Pareto distribution that begins at 0, whose mean is scale / (shape - 1)
            drawn = self._random.pareto(straggler.shape, int(slow.sum()))
            extra[slow] = straggler.seconds * (straggler.shape - 1) * drawn
        return extra
