"""Figures: a drawing with its title, caption, key and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hubring.workers.compare.page.mark import Mark


class Label(NamedTuple):
    """A row's name, and what stands beside it: what it emulates, or does."""

    row: str
    beside: str | None = None


class Answer(NamedTuple):
    """A word that is good or bad news."""

    word: str
    good: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A table of numbers.

    Attributes:
        caption: What it shows.
        heads: Heads of its columns; the first column names the line.
        lines: Cells, one per column.
        words: Heads of the other columns that hold text.
    """

    caption: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str | Label | Answer]]
    words: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with its texts.

    Attributes:
        name: Id of the element, unique in the page.
        title: Shown above it.
        caption: Shown below the title; also describes the drawing to screen readers.
        drawing: Input of its section's template.
        table: The numbers of the drawing.
        key: Meaning of the marks.
        opened: Whether the numbers are visible at first.
    """

    name: str
    title: str
    caption: str
    drawing: Any
    table: Table
    key: Sequence[tuple[Mark, str]] = ()
    opened: bool = False
