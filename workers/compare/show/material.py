"""What the page's sections share: the findings and their panels, line charts, tables, and figures.

The colours are classes of the style sheet, which has a light and a dark form of each.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct

from hubring.ps.page.kit.chart import Axis, path
from hubring.workers.compare.findings import Findings, RowResult
from hubring.workers.compare.plan.experiment import JobMetric
from hubring.workers.compare.plan.row import meets
from hubring.workers.compare.plan.setting import Setting, words
from hubring.workers.compare.statistics import NumberFormat, figures

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


class RowMark(Struct, frozen=True):
    """How a row is drawn.

    Attributes:
        accent: CSS class that sets the colour.
        dash: Dash pattern in SVG; empty: a solid line.
        outline: Path of its symbol.
    """

    accent: str
    dash: str
    outline: str


KNOWN = ("local", "ring", "hub-bsp", "hub-ssp", "hub-asp", "hub-aggregate", "ddp", "mpi", "rpc", "ray")
"""Rows with the same mark on every page, whichever of them are shown."""


def marks(rows: Iterable[str]) -> dict[str, RowMark]:
    """Returns the mark of every row. Other rows use the free marks, which repeat after ten rows."""
    found = {row: KNOWN.index(row) for row in rows if row in KNOWN}
    left = [slot for slot in range(len(KNOWN)) if slot not in found.values()] or list(range(len(KNOWN)))
    others = [row for row in rows if row not in found]
    found |= {row: left[index % len(left)] for index, row in enumerate(dict.fromkeys(others))}
    outlines = list(SHAPES.values())
    return {row: RowMark(f"accent-{slot}", DASHES[slot], outlines[slot]) for row, slot in found.items()}


class Spot(Struct, frozen=True):
    """One point and its interval over seeds."""

    x: float
    y: float
    low: float
    high: float

    @staticmethod
    def at(x: float, y: float) -> Spot:
        """Returns a point without an interval."""
        return Spot(x, y, y, y)


class RowLine(Struct, frozen=True):
    """The line of one row.

    Attributes:
        mark: Colour, dash and symbol.
        label: Name of the row.
        spots: Its points, in ascending x.
        symbols: Whether to draw the row's symbol at each spot.
        joined: Whether to draw a line through the spots.
        predicted: Drawn thin and without symbols, because it was not measured.
    """

    mark: RowMark
    label: str
    spots: Sequence[Spot]
    symbols: bool = False
    joined: bool = True
    predicted: bool = False


def measured_and_predicted(
    mark: RowMark, label: str, points: Iterable[tuple[float, float | None, float | None]]
) -> list[RowLine]:
    """Returns a row's measurements as symbols and its predictions as a thin line.

    Args:
        mark: The row's mark.
        label: Name of the row.
        points: (x, measured, predicted), in ascending x.
    """
    known = list(points)
    measured = [Spot.at(x, y) for x, y, _ in known if y is not None]
    predicted = [Spot.at(x, y) for x, _, y in known if y is not None]
    line = partial(RowLine, mark, label)
    return [line(predicted, predicted=True), line(measured, symbols=True, joined=False)]


class Rule(NamedTuple):
    """A line across the whole drawing, with a name.

    Attributes:
        at: Its value on the y axis, or on the x axis if `upright`.
        words: Its name.
        upright: Whether it is vertical, with its name at the top.
        row: Moves the name down, to keep names apart.
    """

    at: float
    words: str
    upright: bool = False
    row: int = 0


class Lines(Struct, frozen=True):
    """The drawing; `lines.html` draws it.

    Attributes:
        drawn: The lines, the last on top.
        x: The axis at the bottom.
        y: The axis at the left.
        rules: Lines across the drawing.
        fair: Paths of a band and of the line within it, in the background.
        height: In pixels.
    """

    drawn: Sequence[RowLine]
    x: Axis
    y: Axis
    rules: Sequence[Rule] = ()
    fair: tuple[str, str] | None = None
    height: int = 260

    @property
    def bands(self) -> Iterator[tuple[RowMark, str]]:
        """Bands between the ends of the intervals, for lines whose seeds differ."""
        for line in self.drawn:
            if line.joined and not line.predicted and any(spot.low != spot.high for spot in line.spots):
                upper = [self.place(spot.x, spot.high) for spot in line.spots]
                lower = [self.place(spot.x, spot.low) for spot in reversed(line.spots)]
                yield line.mark, path([*upper, *lower], close=True)

    @property
    def strokes(self) -> Iterator[tuple[RowLine, str]]:
        """The lines with their paths."""
        for line in self.drawn:
            if line.joined and line.spots:
                yield line, path(self.place(spot.x, spot.y) for spot in line.spots)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Returns the position of a point as shares of width and height, with y upwards."""
        return self.x.scale.place(x), self.y.scale.place(y)


class Label(NamedTuple):
    """A row's name, and what stands beside it: what it emulates, or does."""

    row: str
    beside: str | None = None


class MarkedWord(NamedTuple):
    """A word that is good or bad news."""

    word: str
    good: bool


class NumberTable(Struct, frozen=True):
    """A table of numbers.

    Attributes:
        caption: What it shows.
        heads: Heads of its columns; the first column names the line.
        lines: Cells, one per column.
        words: Heads of the other columns that hold text.
    """

    caption: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str | Label | MarkedWord]]
    words: Sequence[str] = ()


class DrawnFigure(Struct, frozen=True):
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
    table: NumberTable
    key: Sequence[tuple[RowMark, str]] = ()
    opened: bool = False


class Panel(Struct, frozen=True):
    """A setting with its rows, and with rows of other settings that it does not affect.

    A ring has no servers and a single process no links, so they run once for all settings that differ only
    in these.
    """

    title: str
    entries: Sequence[RowResult]


def panels(findings: Findings) -> list[Panel]:
    """Returns a panel for every setting, except those whose rows are all shown in other panels."""
    borrowed = {key: _rows_of_other_settings(findings, key) for key in findings.setting_keys}
    lent = {id(entry) for entries in borrowed.values() for entry in entries}
    shown = [key for key in borrowed if any(id(entry) not in lent for entry in findings.under(key))]
    order = {row: place for place, row in enumerate(findings.row_names)}
    return [
        Panel(
            words(findings.setting(key)),
            sorted([*findings.under(key), *borrowed[key]], key=lambda entry: order[entry.row]),
        )
        for key in shown
    ]


def _rows_of_other_settings(findings: Findings, key: str) -> list[RowResult]:
    there, setting = {entry.row for entry in findings.under(key)}, findings.setting(key)
    fitting: dict[str, RowResult] = {}
    for entry in findings.rows:
        if entry.row not in there and unaffected(entry.row, findings.setting(entry.setting), setting):
            fitting.setdefault(entry.row, entry)
    return list(fitting.values())


def unaffected(row: str, one: Setting, other: Setting) -> bool:
    """Whether a run of this row is the same in both settings."""
    return meets(row, one) == meets(row, other)


class PageContent(Struct, frozen=True):
    """The findings, and the names and marks of their rows."""

    findings: Findings
    figures: Mapping[str, NumberFormat]
    marks: Mapping[str, RowMark]
    panels: Sequence[Panel]

    @staticmethod
    def of(findings: Findings) -> PageContent:
        """Returns the material for a page of these findings."""
        named = figures(findings.job.samples, findings.job.title)
        return PageContent(findings, named, marks(findings.row_names), panels(findings))

    @property
    def job(self) -> JobMetric:
        """The job, its metric and the target."""
        return self.findings.job

    def name(self, entry: RowResult) -> str:
        """Returns a row's name as text, with what it emulates."""
        row, slept = self.label(entry)
        return f"{row} ({slept})" if slept else row

    def label(self, entry: RowResult) -> Label:
        """Returns a row's name, with the parts of its time that it slept instead of computing."""
        met = meets(entry.row, self.findings.setting(entry.setting))
        parts = {"compute": met.compute, "stragglers": met.straggler}
        slept = [word for word, value in parts.items() if value is not None]
        return Label(entry.row, f"emulated {' and '.join(slept)}".strip() if entry.emulated else None)

    def name_under(self, row: str, settings: Container[str] | None = None) -> str:
        """Returns a row's name in these or all settings, with what it emulates in all or some of them."""
        mine = [each for each in self.findings.rows if each.row == row]
        mine = [each for each in mine if settings is None or each.setting in settings]
        names = list(dict.fromkeys(map(self.name, mine)))
        if len(names) > 1:
            return f"{row} (emulated in part)"
        return names[0] if names else row

    def numbers(self, caption: str, entries: Iterable[RowResult], names: Sequence[str]) -> NumberTable:
        """Returns a table of these numbers, with a line for each row."""
        heads = ["row", *(self.figures[each].head for each in names)]
        lines: list[list[str | Label]] = [
            [self.label(entry), *(self.figures[each].interval(entry.number(each)) for each in names)]
            for entry in entries
        ]
        return NumberTable(caption, heads, lines)

    def key(self, rows: Iterable[str], settings: Container[str] | None = None) -> list[tuple[RowMark, str]]:
        """Returns the meaning of these rows' marks."""
        return [(self.marks[row], self.name_under(row, settings)) for row in dict.fromkeys(rows)]
