"""Marks: each row has its own colour, dash and symbol in every drawing.

The colours are classes of the style sheet, which has a light and a dark form of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHAPES = {
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "square": "M-3.6-3.6h7.2v7.2h-7.2z",
    "diamond": "M0-5L5 0L0 5L-5 0z",
    "triangle": "M0-4.8L4.6 3.6H-4.6z",
    "down": "M0 4.8L4.6-3.6H-4.6z",
    "plus": "M-1.6-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z",
    "cross": "M-4.4-2.2L-2.2-4.4L0-2.2L2.2-4.4L4.4-2.2L2.2 0L4.4 2.2L2.2 4.4L0 2.2L-2.2 4.4L-4.4 2.2L-2.2 0z",
    "bar": "M-1.8-5h3.6v10h-3.6z",
    "wide": "M-5-1.8h10v3.6h-10z",
    "star": "M0-5.4L1.5-1.7L5.2-1.7L2.2.6L3.3 4.4L0 2.1L-3.3 4.4L-2.2.6L-5.2-1.7L-1.5-1.7z",
}
"""Outlines around the origin, in pixels."""

DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 3", "1 2", "6 2 1 2 1 2", "3 5", "10 2 4 2")


@dataclass(frozen=True, slots=True)
class Mark:
    """How a row is drawn.

    Attributes:
        accent: CSS class that sets the colour.
        dash: Dash pattern in SVG; empty: a solid line.
        shape: Key of `SHAPES`.
    """

    accent: str
    dash: str
    shape: str

    @property
    def outline(self) -> str:
        """Path of its symbol."""
        return SHAPES[self.shape]


KNOWN = ("local", "ring", "hub-bsp", "hub-ssp", "hub-asp", "hub-aggregate", "ddp", "mpi", "rpc", "ray")
"""Rows with the same mark on every page, whichever of them are shown."""


def marks(rows: Iterable[str]) -> dict[str, Mark]:
    """Returns the mark of every row. Other rows use the free marks, which repeat after ten rows."""
    found = {row: KNOWN.index(row) for row in rows if row in KNOWN}
    left = [slot for slot in range(len(KNOWN)) if slot not in found.values()] or list(range(len(KNOWN)))
    others = [row for row in rows if row not in found]
    found |= {row: left[index % len(left)] for index, row in enumerate(dict.fromkeys(others))}
    shapes = list(SHAPES)
    return {row: Mark(f"accent-{slot}", DASHES[slot], shapes[slot]) for row, slot in found.items()}
