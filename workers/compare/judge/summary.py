"""Summaries: a row's numbers in one setting, over all seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.plan import Run, counted
from hubring.workers.compare.experiment.row import Row
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.judge.gate import Gate
from hubring.workers.compare.judge.measure import Numbers
from hubring.workers.compare.result.numbers import NAMES, SPEEDS, WORST
from hubring.workers.compare.result.statistics import median_interval

Values = list[float | None]
"""One a seed; None where that seed has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A row in a setting.

    Attributes:
        setting: As in the experiment.
        row: Which way.
        seeds: In the order of all values.
        withheld: Why no speed is shown; None: they are.
        failed: How many of its runs did not come to their end, and why; None: all did.
        numbers: For each of `NAMES`, the values, or None where no seed has one. A speed is None as well
            where a run diverged: those that were left would race for all.
        staleness: How many pushes had which, over all seeds.
    """

    setting: Setting
    row: Row
    seeds: Sequence[int]
    withheld: str | None
    failed: str | None
    numbers: Mapping[str, Values | None]
    staleness: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """The summary as a JSON object, with medians and their intervals."""
        return {
            "setting": self.setting.key,
            "row": self.row.name,
            "about": self.row.about,
            "synchronous": self.row.synchronous,
            "emulated": self.row.meets(self.setting).emulated,
            "seeds": list(self.seeds),
            "withheld": self.withheld,
            "failed": self.failed,
            "numbers": {name: _with_interval(values) for name, values in self.numbers.items()},
            "staleness": dict(self.staleness),
        }


def summarise(
    experiment: Experiment,
    gate: Gate,
    numbers: Mapping[str, Numbers],
    staleness: Mapping[str, Mapping[str, int]],
    failures: Mapping[str, str],
) -> list[Summary]:
    """One summary for every row of every setting.

    Args:
        experiment: What was run.
        gate: What may be shown.
        numbers: Of every run, by label.
        staleness: Counts of every run, by label.
        failures: Why runs did not come to their end, by label.
    """
    summaries = []
    for setting in experiment.settings:
        for row in experiment.ways:
            by_seed = [counted(experiment, setting, row, seed) for seed in experiment.seeds]
            labels = [run.label for runs in by_seed for run in runs]
            failed = [failures[label] for label in labels if label in failures]
            withheld = gate.closed_to(labels)
            timed = all(numbers[label]["step_ms"] is not None for label in labels)
            summary = Summary(
                setting=setting,
                row=row,
                seeds=experiment.seeds,
                withheld=withheld,
                failed=f"{len(failed)} of {len(labels)} runs: {failed[0]}" if failed else None,
                numbers={name: _values(name, by_seed, numbers, timed and withheld is None) for name in NAMES},
                staleness=sum((Counter(staleness[label]) for label in labels), Counter()),
            )
            summaries.append(summary)
    return summaries


def _values(
    name: str, by_seed: Sequence[Sequence[Run]], numbers: Mapping[str, Numbers], timed: bool
) -> Values | None:
    if name in SPEEDS and not timed:
        return None
    of_turns = max if name in WORST else median
    values = [_of_seed([numbers[run.label][name] for run in runs], of_turns) for runs in by_seed]
    return None if all(value is None for value in values) else values


def _of_seed(turns: Sequence[float | None], of_turns: Callable[[Sequence[float]], float]) -> float | None:
    """Of several runs with one seed one value; None if one of them has none."""
    known = [value for value in turns if value is not None]
    return of_turns(known) if len(known) == len(turns) else None


def _with_interval(values: Values | None) -> dict[str, Any] | None:
    if values is None:
        return None
    interval = median_interval([value for value in values if value is not None])
    return {"values": values, "median": interval.median, "low": interval.low, "high": interval.high}
