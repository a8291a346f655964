"""What a person sees while the rows run, and after; all of it on standard error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from workers.compare.outcome import Line
from workers.compare.table import FOOTNOTES, columns, lines, reasons


class Screen:
    """Shows which run is at which step with which loss, then the table.

    Args:
        runs: Labels of the runs to come.
    """

    def __init__(self, runs: Sequence[str]) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._runs = list(runs)
        self._task = self._bar.add_task(f"{runs[0]}: starting", total=len(runs))
        self._last: Line = {}

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def progress(self, run: str, line: Line) -> None:
        """Shows the step and the loss that rank 0 reported last."""
        self._last = {**self._last, **line}
        self._bar.update(self._task, description=f"{run}: {_told(self._last)}")

    def finished(self, run: str) -> None:
        """Leaves a line for a run that is over, and announces the next."""
        self._bar.print(f"{run}: {_told(self._last)}")
        self._last = {}
        self._advance(run)

    def kept(self, run: str) -> None:
        """Leaves a line for a run that was finished before."""
        self._bar.print(f"{run}: kept")
        self._advance(run)

    def warn(self, text: str) -> None:
        """Says what to mind."""
        self._bar.print(text, style="yellow")

    def _advance(self, run: str) -> None:
        self._bar.advance(self._task)
        if later := self._runs[self._runs.index(run) + 1 :]:
            self._bar.update(self._task, description=f"{later[0]}: starting")


def show(results: Mapping[str, Any]) -> None:
    """Prints the table and the verdict."""
    console = Console(stderr=True, highlight=False)
    table = Table(*columns(results), box=None, pad_edge=False, padding=(0, 1, 0, 0))
    words = len(results["settings"]) > 1
    for place, column in enumerate(table.columns):
        column.no_wrap = place <= 1 + words
        column.justify = "right" if place > words else "left"
    for line in lines(results):
        table.add_row(*line)
    console.print(table)
    for note in (*reasons(results), *FOOTNOTES):
        console.print(note, style="dim")
    console.print()
    for sentence in results["verdict"]:
        console.print(f"* {sentence}")


def _told(line: Line) -> str:
    loss = line.get("test_loss", line.get("loss"))
    return f"step {line.get('step', 0)}" + ("" if loss is None else f", loss {loss:.4f}")
