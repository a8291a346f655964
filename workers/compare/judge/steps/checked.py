"""The result of judging the steps of one run."""

from __future__ import annotations

from collections.abc import Sequence
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
        open: Steps without known parameters after them: the last ones, if `step()` does not wait.
        written: Steps before which something other than a step changed parameters.
    """

    taken: int
    judged: int
    unjudged: str = ""
    fault: str = ""
    step: int = 0
    open: int = 0
    written: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every step that can be was judged, and nothing is wrong."""
        return 0 < self.judged == self.taken - self.open and not self.fault

    @classmethod
    def of_all(cls, each: Sequence[Checked]) -> Checked:
        """Returns what several optimizers of one run show: their sums, and the first fault."""
        wrong = next((one for one in each if one.fault), None)
        return cls(
            taken=sum(one.taken for one in each),
            judged=sum(one.judged for one in each),
            unjudged=next((one.unjudged for one in each if one.unjudged), ""),
            fault=wrong.fault if wrong else "",
            step=wrong.step if wrong else 0,
            open=sum(one.open for one in each),
            written=frozenset[int]().union(*(one.written for one in each)),
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """What of a run's steps can be judged.

    Attributes:
        unjudged: Why updates cannot be replayed, if that is known before; empty if it is not.
        exchange: Whether exchanges can be judged.
    """

    unjudged: str = ""
    exchange: bool = True


EVERYTHING = Reach()


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
