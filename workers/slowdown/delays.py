"""How long a worker's step is made to take: the same in every process that is told the same.

The law: a delay follows from the seed, the rank and the step alone, so every row meets the same
delays in the same steps, whatever it does between them.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.slowdown.straggler import Straggler

SLOW_SHARE = 0.1
"""How many of its steps a slow host is slow in."""


class Slowness(Struct, frozen=True, forbid_unknown_fields=True):
    """What all workers of a run are told, in the file that `ps-worker --hardship` reads.

    Attributes:
        straggler: Who is slow, and how; None: nobody.
        compute: Seconds that a step computes elsewhere, on a GPU say; None: what it computes here counts.
        seed: Of what is drawn.
    """

    straggler: Straggler | None = None
    compute: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.compute is not None and not self.compute >= 0:
            raise UsageError(f"compute: {self.compute:g} s a step; seconds are at least 0")

    def of(self, rank: int) -> Delays:
        """One worker's part of it."""
        return Delays(self.straggler, self.compute, self.seed, rank)


class Delays:
    """The delays of one worker.

    Args:
        straggler: Who is slow, and how; None: nobody.
        compute: Seconds that every step computes at the least; None: only as long as it does.
        seed: Of what is drawn.
        rank: Whose delays these are.

    Attributes:
        compute: As given; 0 for None.
    """

    def __init__(self, straggler: Straggler | None, compute: float | None, seed: int, rank: int) -> None:
        self.compute = compute or 0.0
        self._seed = seed
        self._rank = rank
        self._straggler = straggler if straggler and rank in (straggler.ranks or (rank,)) else None

    def lateness(self, step: int) -> float:
        """How many seconds more this worker takes for a step, counted from 0."""
        straggler = self._straggler
        if straggler is None:
            return 0.0
        if straggler.kind == "constant":
            return straggler.seconds
        if straggler.kind == "host":
            slow = self._draw(step) < SLOW_SHARE
            return straggler.seconds / SLOW_SHARE if slow else 0.0
        # Lomax: a Pareto distribution that begins at 0. Its mean is scale / (shape - 1).
        scale = straggler.seconds * (straggler.shape - 1)
        return float(scale * ((1 - self._draw(step, self._rank)) ** (-1 / straggler.shape) - 1))

    def _draw(self, *words: int) -> float:
        """An even number from 0 to below 1; seeded by text, `Random` gives the same one everywhere."""
        return Random("/".join(map(str, (self._seed, *words)))).random()  # noqa: S311 - no secret
