"""The delay of each step of a worker.

The rule: a delay depends only on the seed, the rank and the step. So every row of a comparison has the same
delays in the same steps.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.slowdown.straggler import Straggler

SLOW_SHARE = 0.1
"""Share of the steps in which a slow host is slow."""


class Slowness(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file that `ps-worker --hardship` reads; the same for all workers of a run.

    Attributes:
        straggler: Which ranks are slow, and how; None: none.
        compute: Seconds of computing in a step on the emulated device, for example a GPU; None: no emulation.
        seed: Seed of the random delays.
    """

    straggler: Straggler | None = None
    compute: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.compute is not None and not self.compute >= 0:
            raise UsageError(f"compute: {self.compute:g} s per step; expected at least 0")

    def of(self, rank: int) -> Delays:
        """Returns the delays of one worker."""
        return Delays(self.straggler, self.compute, self.seed, rank)


class Delays:
    """The delays of one worker.

    Args:
        straggler: Which ranks are slow, and how; None: none.
        compute: Seconds that every step computes at least; None: no minimum.
        seed: Seed of the random delays.
        rank: The worker's rank.

    Attributes:
        compute: The argument; 0 for None.
    """

    def __init__(self, straggler: Straggler | None, compute: float | None, seed: int, rank: int) -> None:
        self.compute = compute or 0.0
        self._seed = seed
        self._rank = rank
        self._straggler = straggler if straggler and rank in (straggler.ranks or (rank,)) else None

    def lateness(self, step: int) -> float:
        """Returns the extra seconds of a step; steps count from 0."""
        straggler = self._straggler
        if straggler is None:
            return 0.0
        if straggler.kind == "constant":
            return straggler.seconds
        if straggler.kind == "host":
            slow = self._draw(step) < SLOW_SHARE
            return straggler.seconds / SLOW_SHARE if slow else 0.0
        # Lomax: a Pareto distribution that starts at 0. Its mean is scale / (shape - 1).
        scale = straggler.seconds * (straggler.shape - 1)
        return float(scale * ((1 - self._draw(step, self._rank)) ** (-1 / straggler.shape) - 1))

    def _draw(self, *words: int) -> float:
        """Returns a uniform number from [0, 1). A text seed gives the same number on every host."""
        return Random("/".join(map(str, (self._seed, *words)))).random()  # noqa: S311 - no secret
