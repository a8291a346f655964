"""One comparison, from the rows asked for to the results and the report.

`results.json` holds one object:

    job, seed, workers, shards, transport, threads, epochs (null: the job's own)
    target     metric, title, value
    machine    what it ran on, versions included
    command    repeats the comparison
    commands   run -> the commands that it consisted of
    gate       passed, tolerance, pairs: first, second, difference, tensor, limit, passed
               (a difference that is not finite stands as text: "inf", "nan")
    rows       one object a row: the fields of `workers.compare.measure.Measure`;
               speeds are null where `withheld` says why
    verdict    sentences
    curves     row -> loss, metric: points of seconds, samples and value;
               empty for a row whose speed is withheld
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from safetensors.torch import load_file

from workers.compare import gate, machine
from workers.compare.gate import Gate
from workers.compare.job import Job
from workers.compare.measure import Measure, curves, measure
from workers.compare.outcome import Line, Outcome
from workers.compare.report import page
from workers.compare.row import Row
from workers.compare.runner import Runner
from workers.compare.verdict import verdict

Progress = Callable[[str, Line], None]
"""Told the run and rank 0's latest report."""

RERUN = "hub-bsp"
"""The row that is run a second time: its bits must come out the same."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to compare and how.

    Attributes:
        job: The job that ships.
        rows: Ways to train it, in order; the first synchronous one is measured against.
        runner: Starts them.
        seed: The job's.
        epochs: The job's; None: as it likes.
        target: Value of the job's measure that counts as reached.
        tolerance: How far synchronous rows may be apart.
        command: What the user typed, for the report.
    """

    job: Job
    rows: Sequence[Row]
    runner: Runner
    seed: int
    epochs: int | None
    target: float
    tolerance: float
    command: str

    @property
    def runs(self) -> dict[str, Row]:
        """All runs to come by label, second runs included."""
        again = {f"{row.name} {gate.AGAIN}": row for row in self.rows if row.name == RERUN}
        return {row.name: row for row in self.rows} | again

    def run(
        self, progress: Progress, finished: Callable[[str], None]
    ) -> tuple[list[Measure], dict[str, Any]]:
        """Runs every row, judges, measures, and writes `results.json` and `report.html`.

        Args:
            progress: Called a few times a second.
            finished: Called with the label of every run that ended.

        Returns:
            The measures, and the results as written.

        Raises:
            ProcessFailed: A row's process failed.
            DeadlineExceeded: A row took too long.
        """
        outcomes = {}
        for label, row in self.runs.items():
            outcomes[label] = self.runner.run(row, label, partial(progress, label))
            finished(label)
        judged = self._judge(outcomes)
        measures = [
            _shown(measure(row, outcomes[row.name], self.job, self.target), judged) for row in self.rows
        ]
        results = self._results(outcomes, judged, measures)
        directory = self.runner.directory
        (directory / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False))
        (directory / "report.html").write_text(page(results, measures, self.job))
        return measures, results

    def _judge(self, outcomes: dict[str, Outcome]) -> Gate:
        finals = {row.name: load_file(outcomes[row.name].parameters) for row in self.rows if row.synchronous}
        again = {
            row.name: load_file(outcomes[label].parameters)
            for label, row in self.runs.items()
            if label != row.name
        }
        return gate.judge(finals, again, self.tolerance)

    def _results(
        self, outcomes: dict[str, Outcome], judged: Gate, measures: Sequence[Measure]
    ) -> dict[str, Any]:
        return {
            "job": self.job.name,
            "seed": self.seed,
            "workers": self.runner.workers,
            "shards": self.runner.shards,
            "transport": self.runner.transport,
            "threads": self.runner.threads,
            "epochs": self.epochs,
            "target": {"metric": self.job.metric, "title": self.job.title, "value": self.target},
            "machine": machine.describe(),
            "command": self.command,
            "commands": {run: list(outcome.commands) for run, outcome in outcomes.items()},
            "gate": {
                "passed": judged.passed,
                "tolerance": self.tolerance,
                "pairs": [
                    {**asdict(pair), "difference": _finite(pair.difference), "passed": pair.passed}
                    for pair in judged.pairs
                ],
            },
            "rows": [each.as_json() for each in measures],
            "verdict": verdict(measures, self.job, self.target),
            "curves": {
                each.row: {} if each.withheld else curves(outcomes[each.row], self.job.metric)
                for each in measures
            },
        }


def _shown(measured: Measure, judged: Gate) -> Measure:
    """The measure, or what of it may be shown."""
    reason = judged.closed_to(measured.row)
    return measured if reason is None else measured.without_speeds(reason)


def _finite(value: float) -> float | str:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else str(value)
