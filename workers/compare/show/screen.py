"""Terminal output during the runs and after; all of it on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hubring.ps.page.kit.figures import NOTHING, size
from hubring.workers.compare.findings import Findings, RowResult
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.plan.setting import legend, words
from hubring.workers.compare.run.outcome import Line
from hubring.workers.compare.run.timeline import clock_sentence
from hubring.workers.compare.show import exports, figures
from hubring.workers.compare.show.speed import COLUMNS
from hubring.workers.compare.statistics import SPEEDS, Number, interval_words


def table(findings: Findings, setting: str) -> tuple[list[str], list[list[str]]]:
    """Returns the columns' heads and the cells of a setting's rows; a withheld speed reads `withheld`."""
    columns = _columns(findings)
    cells = [[cell(each) for _, cell in columns] for each in findings.under(setting)]
    return [head for head, _ in columns], cells


def _columns(findings: Findings) -> list[tuple[str, Callable[[RowResult], str]]]:
    """Returns the head of each column, and what makes a row's cell."""
    job, priced = findings.job, findings.asked.prices is not None
    target = "target" if job.target is None else f"{job.target:g}"

    def number(named: str, form: str) -> Callable[[RowResult], str]:
        hidden = named in SPEEDS
        return lambda row: "withheld" if hidden and row.withheld else _number(row.number(named), form)

    prices = [("price/epoch", "price_per_epoch"), (f"price to {target}", "price_to_target")]
    return [
        ("row", lambda row: f"{row.row} (emulated)" if row.emulated else row.row),
        (f"{job.samples}/s", number("samples_per_second", ",.0f")),
        ("step ms", number("step_ms", ".2f")),
        (f"s to {target}", number("seconds_to_target", ".2f")),
        *((head, number(name, ".3g")) for head, name in prices if priced),
        *([("final loss", number("final_loss", ".4f"))] if job.metric != "loss" else []),
        (job.title, number("final_metric", ".3f")),
        ("bytes per step", _bytes),
        ("memory MB", number("memory_mb", ",.0f")),
        ("CPU ms", number("cpu_ms_per_step", ".2f")),
        ("exposed ms", number("exposed_ms", ".2f")),
        ("stale mean/max", _stale),
    ]


def notes(findings: Findings) -> list[str]:
    """Returns notes to print below the table; only those that concern these rows."""
    rows = {each.row for each in findings.rows}
    slept = any(each.emulated for each in findings.rows)
    priced, epochs = findings.asked.prices is not None, findings.asked.epochs is not None
    hub, ring = any(row.startswith("hub-") for row in rows), "ring" in rows
    part = figures.partial(each.number(name) for each in findings.rows for name in COLUMNS)
    texts = {
        _spread_note(findings.seeds): True,
        "Samples per second are means, step times medians, after warm-up.": True,
        "Emulated: workers slept for part of every step instead of computing.": slept,
        "local is one process with the whole batch and as many threads as each worker.": "local" in rows,
        "Bytes are sent plus received; the ring's are computed, 2(n-1)/n of the model each.": ring,
        "The bytes of ring-local are means: one worker of each host sends for all.": "ring-local" in rows,
        "Exposed: time a step was blocked on exchange that did not overlap with compute.": hub or ring,
        "Memory and CPU are of one worker: at most, and in a step.": True,
        "Prices are of all hosts, while they train.": priced,
        "The price of an epoch is not known: set epochs in the file, or --epochs.": priced and not epochs,
        "Staleness: updates by other workers between a worker's read and its own update.": hub,
    }
    return [
        *filter(None, [figures.record_share(findings), figures.drift(findings.gate), part]),
        *figures.uneven(findings),
        *filter(None, [clock_sentence(findings.clocks)]),
        *(note for note, concerns in texts.items() if concerns),
    ]


def _spread_note(seeds: int) -> str:
    if seeds == 1:
        return "One seed: there is no interval, and any difference can be chance."
    held = interval_words(seeds)
    return f"Medians over {seeds} seeds. ± is half of an interval that {held}."


def _number(number: Number | None, form: str) -> str:
    """Returns a median, half of its interval if at least 0.5%, and how many seeds have a value if not all."""
    if number is None:
        return NOTHING
    half = (number.high - number.low) / 2 / abs(number.median or 1.0)
    spread = f" ±{half:.0%}" if half >= 0.005 else ""
    return f"{number.median:{form}}{spread}{number.part}"


def _bytes(entry: RowResult) -> str:
    both = [entry.median(f"bytes_{way}_per_step") for way in ("sent", "received")]
    known = [value for value in both if value is not None]
    return size(sum(known)) if known else NOTHING


def _stale(entry: RowResult) -> str:
    mean, most = entry.number("staleness_mean"), entry.number("staleness_max")
    if mean is None or most is None:
        return NOTHING
    return f"{mean.median:.2f}/{most.most:g}"


FILE_WIDTH = 200
"""Columns of a log, which has no window size; enough for every table."""


class RunScreen:
    """Shows the current run with its step and loss. Runs are identified by their label.

    Args:
        runs: All runs.
    """

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
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

    def __enter__(self) -> RunScreen:
        self._bar.start()
        self._bar.print(f"In the names of runs, {self._settings}.", style="dim", markup=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def calibrating(self, what: str) -> None:
        """Shows which property of the machine is measured."""
        self._bar.update(self._task, description=f"this machine: {what}")

    def progress(self, run: str, line: Line) -> None:
        """Shows the step and the loss that rank 0 reported last; called a few times a second."""
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

    def again(self, run: str) -> None:
        """Shows that a run that was disturbed is repeated."""
        self._bar.print(f"{run}: was disturbed, and is run again")
        self._runs = [run]  # none is the next one
        self._bar.update(self._task, total=(self._bar.tasks[0].total or 0) + 1)

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
    """Prints the tables, their notes, the verdict, and last the answer, whether to trust it, and the report.

    Args:
        findings: The findings.
        report: Path of the page.
    """
    console = _console()
    for setting in findings.setting_keys:
        if len(findings.setting_keys) > 1:
            console.print(f"\n{words(findings.setting(setting))}", style="bold", markup=False)
        console.print(_table(*table(findings, setting)))
        if timed := figures.exchanges(findings, setting):
            console.print()
            console.print(_table(figures.HEADS, timed))
    for note in (*notes(findings), *(figures.SENTENCES if findings.bandwidth else ())):
        console.print(note, style="dim", markup=False)
    console.print()
    for sentence in findings.verdict:
        console.print(f"* {sentence}", markup=False)
    if lack := exports.lacks_tensorboard():
        console.print(lack, style="dim", markup=False, soft_wrap=True)
    console.print(f"\n{findings.answer}", style="bold", markup=False, soft_wrap=True)
    console.print(figures.trust(findings), markup=False, soft_wrap=True)
    console.print(f"Report, to open in a browser: {report}", markup=False, soft_wrap=True)


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
