"""What workers in lockstep hear if one of them finishes and others take more steps."""

from __future__ import annotations

from typing import NamedTuple

from hubring.ps.core.types import Member

FIX = (
    "If ranks have different numbers of batches, pass uneven=True to DistributedOptimizer on all ranks, and"
    " call optimizer.join() after the last batch"
)


class Finish(NamedTuple):
    """The first worker that finished, after `step` completed steps."""

    member: Member
    step: int

    @property
    def ends_rest(self) -> str:
        """The error where the others cannot step without it: on a ring, and where a hub only averages."""
        return f"{self}, so no rank can take step {self.step + 1}. {FIX}"

    @property
    def warning(self) -> str:
        """The warning where a hub steps without it."""
        return f"{self}; the other ranks go on without it, with the mean of their gradients. {FIX}"

    def __str__(self) -> str:
        return f"{self.member} finished after {self.step} steps"
