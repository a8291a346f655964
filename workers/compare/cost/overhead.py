"""The one thing that is left free: what the job takes beside its exchange, on this machine.

A step's forward and backward, Python's way through it, the recording: nobody can tell them
from constants. So each row's first measurement in a plain setting says what is left when the exchange is
taken away, and that counts as its computing everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds a step and worker, as they change with the number of workers.

    Attributes:
        fixed: Of every worker, whatever its share of the batch.
        batch: Of the whole batch, of which each of n has an n-th.
        cores: Which all share; 0: each host has its own.
    """

    fixed: float
    batch: float = 0.0
    cores: int = 0

    def of(self, workers: int) -> float:
        """What a step takes beside its exchange."""
        return self._crowd(workers) * (self.fixed + self.batch / workers)

    def _crowd(self, workers: int) -> float:
        return max(1.0, workers / self.cores) if self.cores else 1.0

    @staticmethod
    def solve(rest: float, workers: int, cores: int, alone: float | None) -> Overhead:
        """From what was left of one row's step.

        Args:
            rest: Its seconds without the exchange.
            workers: How many it had.
            cores: As the attribute.
            alone: The same of one process with the whole batch; None: not known, and nothing of `rest` is
                then taken to shrink with the share.
        """
        each = max(0.0, rest) / Overhead(0.0, 0.0, cores)._crowd(workers)
        if alone is None or workers == 1:
            return Overhead(each, 0.0, cores)
        # alone = fixed + batch, each = fixed + batch / workers
        batch = min(max(0.0, (alone - each) / (1 - 1 / workers)), each * workers)
        return Overhead(each - batch / workers, batch, cores)
