"""A line of the table that `make gpu` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One part, how it ended, and what was measured or what went wrong, in one line."""

    part: str
    outcome: Literal["passed", "failed", "left out"]
    measured: str


def table(rows: Sequence[Row]) -> str:
    """The rows under a head, in columns as wide as what they hold."""
    lines = [("part", "outcome", "measured"), *((row.part, row.outcome, row.measured) for row in rows)]
    parts, outcomes = (max(len(line[column]) for line in lines) for column in (0, 1))
    return "\n".join(
        f"{part:<{parts}}  {outcome:<{outcomes}}  {measured}".rstrip() for part, outcome, measured in lines
    )


def exit_code(rows: Iterable[Row]) -> int:
    """1 if a part failed."""
    return int(any(row.outcome == "failed" for row in rows))
