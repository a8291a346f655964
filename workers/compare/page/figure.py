"""Figures: what every drawing has: a title, a sentence that says what it shows, a key, its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hubring.workers.compare.page.mark import Mark


class Label(NamedTuple):
    """A row's name, and what is emulated of it."""

    row: str
    slept: str | None = None


class Answer(NamedTuple):
    """A word that is good news or bad."""

    word: str
    good: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A table of numbers.

    Attributes:
        caption: What it holds.
        heads: Of its columns; the first column names the line.
        lines: Cells, as many as there are columns.
        words: Heads of the other columns that hold words.
    """

    caption: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str | Label | Answer]]
    words: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with all that belongs to it.

    Attributes:
        name: Of the element, unique in the page.
        title: Above it.
        says: What is to be seen, for those who do not see it too.
        drawing: What its section's template draws.
        table: The numbers that were drawn.
        key: What the marks mean.
        opened: Whether the numbers are in sight from the start.
    """

    name: str
    title: str
    says: str
    drawing: Any
    table: Table
    key: Sequence[tuple[Mark, str]] = ()
    opened: bool = False
