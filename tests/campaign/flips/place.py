"""A place where bits flip, and what came of them."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Protocol


class Outcome(StrEnum):
    """What came of one flipped bit."""

    DETECTED = "detected"
    """It was refused, sent again, or an older file was used."""
    HARMLESS = "harmless"
    """The reader got what was written."""
    SILENT = "silent"
    """The reader got something else and did not notice."""


class Place(Protocol):
    """Where bits flip.

    Attributes:
        name: For the table.
        share: The part of all flips that it gets, in relation to other places.
        bits: Number of its bits.
    """

    name: str
    share: int
    bits: int

    def flip(self, bit: int) -> Outcome | None:
        """Flips one bit in a fresh copy and reads it; returns None if the bit did not come by."""


Counts = dict[str, Counter[Outcome]]
"""Outcomes by place."""


def table(counts: Counts) -> str:
    """Returns the outcomes as a Markdown table."""
    lines = ["| place | flips | detected | harmless | silent |", "| --- | ---: | ---: | ---: | ---: |"]
    total: Counter[Outcome] = Counter()
    for name, found in counts.items():
        total += found
        lines.append(_row(name, found))
    return "\n".join([*lines, _row("all", total)])


def _row(name: str, found: Counter[Outcome]) -> str:
    cells = [name, found.total(), *(found[outcome] for outcome in Outcome)]
    return f"| {' | '.join(map(str, cells))} |"
