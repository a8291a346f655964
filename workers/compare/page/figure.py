"""Figures: what every drawing has: a title, a sentence that says what it shows, a key, its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Column(NamedTuple):
    """A column of numbers: its head, and whether it holds words."""

    head: str
    words: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of numbers.

    Attributes:
        caption: What it holds.
        columns: Its heads; the first column names the line.
        lines: Cells, as many as there are columns.
    """

    caption: str
    columns: Sequence[Column]
    lines: Iterable[Sequence[str | Label | Answer]]


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
