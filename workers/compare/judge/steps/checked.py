"""The result of judging the steps of one run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """What the steps of one run show.

    Attributes:
        taken: Steps that the run took.
        judged: Steps whose update was compared with the reference's.
        unjudged: Why the others were not; empty if all were.
        fault: What is wrong, as a clause; empty if nothing is.
        step: The step of the fault; 0: none, or no single one.
        written: Steps before which something other than a step changed parameters.
    """

    taken: int
    judged: int
    unjudged: str = ""
    fault: str = ""
    step: int = 0
    written: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every step was judged, and nothing is wrong."""
        return 0 < self.taken == self.judged and not self.fault


class Fault(Exception):
    """A step did something else than it should.

    Args:
        step: The step; 0: no single one.
        text: What it did, as a clause.
    """

    def __init__(self, step: int, text: str) -> None:
        super().__init__(text)
        self.step = step
        self.text = text
