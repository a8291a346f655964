"""Terminal output during the runs and after; all of it on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.output import scalars
from hubring.workers.compare.output.exchange_table import HEADS, SENTENCES, exchanges
from hubring.workers.compare.output.table import columns, lines, notes
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.setting_text import legend, words
from hubring.workers.compare.run.outcome import Line

FILE_WIDTH = 200
"""Columns of a log, which has no window size; enough for every table."""


class Screen:
    """Shows the current run with its step and loss.

    Args:
        runs: All runs.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._console = _console()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._runs = [run.label for run in runs]
        self._settings = legend(run.setting for run in runs)
        self._task = self._bar.add_task(f"{self._runs[0]}: starting", total=len(runs))
        self._last: Line = {}

    def __enter__(self) -> Screen:
        self._bar.start()
        self._bar.print(f"{self._settings}.", style="dim", markup=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def calibrating(self, what: str) -> None:
        """Shows which property of the machine is measured."""
        self._bar.update(self._task, description=f"this machine: {what}")

    def progress(self, run: str, line: Line) -> None:
        """Shows the step and the loss that rank 0 reported last."""
        self._last = {**self._last, **line}
        self._bar.update(self._task, description=f"{run}: {_step_and_loss(self._last)}")

    def finished(self, run: str) -> None:
        """Prints a line for a run that has ended and shows the next one."""
        self._bar.print(f"{run}: {_step_and_loss(self._last)}")
        self._last = {}
        self._advance(run)

    def skipped(self, run: str) -> None:
        """Prints a line for a run that finished earlier."""
        self._bar.print(f"{run}: already finished")
        self._advance(run)

    def checking(self, run: str) -> None:
        """Shows which run's steps are re-checked."""
        self._bar.update(self._task, description=f"checking the steps of {run}")

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self._bar.print(text, style="yellow")

    def _advance(self, run: str) -> None:
        self._bar.advance(self._task)
        if later := self._runs[self._runs.index(run) + 1 :]:
            self._bar.update(self._task, description=f"{later[0]}: starting")


def show(findings: Findings, report: Path) -> None:
    """Prints the tables, their notes, the verdict, the path of the report, and the answer last.

    Args:
        findings: The findings.
        report: Path of the page.
    """
    console = _console()
    for setting in findings.setting_keys:
        if len(findings.setting_keys) > 1:
            console.print(f"\n{words(findings.setting(setting), setting)}", style="bold", markup=False)
        console.print(_table(columns(findings), lines(findings, setting)))
        if timed := exchanges(findings, setting):
            console.print()
            console.print(_table(HEADS, timed))
    for note in (*notes(findings), *(SENTENCES if findings.bandwidth else ())):
        console.print(note, style="dim", markup=False)
    console.print()
    for sentence in findings.verdict:
        console.print(f"* {sentence}", markup=False)
    if lack := scalars.lack():
        console.print(lack, style="dim", markup=False, soft_wrap=True)
    console.print(f"\nReport, to open in a browser: {report}", markup=False, soft_wrap=True)
    console.print(f"\n{findings.answer}", style="bold", markup=False, soft_wrap=True)


def _console() -> Console:
    """Standard error. Without a width, rich assumes 80 columns for a file and breaks the tables."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else FILE_WIDTH)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns the table of one setting: first column left-aligned, the others right-aligned."""
    first, *others = heads
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for head in others:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _step_and_loss(line: Line) -> str:
    loss = line.get("test_loss", line.get("loss"))
    return f"step {line.get('step', 0)}" + ("" if loss is None else f", loss {loss:.4f}")
