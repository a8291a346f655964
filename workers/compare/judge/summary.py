"""Summaries: a row's numbers in one setting over all seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import median

from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.plan import Run, counted
from hubring.workers.compare.judge.gate import Judgement
from hubring.workers.compare.judge.measure import Numbers
from hubring.workers.compare.result.findings import Entry, Number
from hubring.workers.compare.result.numbers import NAMES, SPEEDS, WORST


def summarise(
    experiment: Experiment,
    judged: Judgement,
    numbers: Mapping[str, Numbers],
    staleness: Mapping[str, Mapping[str, int]],
    failures: Mapping[str, str],
    disturbed: Mapping[str, str],
) -> list[Entry]:
    """Returns one entry for every row of every setting.

    Args:
        experiment: The experiment.
        judged: Result of the gate, which decides what to withhold.
        numbers: Of every run, by label.
        staleness: Counts of every run, by label.
        failures: Why runs did not finish, by label.
        disturbed: What disturbed runs, by label.
    """
    entries = []
    for setting, row in product(experiment.settings, experiment.ways):
        by_seed = [counted(experiment, setting, row, seed) for seed in experiment.seeds]
        labels = [run.label for runs in by_seed for run in runs]
        failed = [failures[label] for label in labels if label in failures]
        upset = [disturbed[label] for label in labels if label in disturbed]
        withheld = judged.closed_to(labels)
        timed = withheld is None and all(numbers[label]["step_ms"] is not None for label in labels)
        entry = Entry(
            setting=setting.key,
            row=row.name,
            about=row.about,
            synchronous=row.synchronous,
            exact=row.exact,
            emulated=row.meets(setting).emulated,
            seeds=list(experiment.seeds),
            withheld=withheld,
            disturbed=f"{upset[0]} in {len(upset)} of {len(labels)} runs of {row.name}" if upset else None,
            failed=f"{len(failed)} of {len(labels)} runs: {failed[0]}" if failed else None,
            numbers={
                name: None if name in SPEEDS and not timed else _number(name, by_seed, numbers)
                for name in NAMES
            },
            staleness=dict(sum((Counter(staleness[label]) for label in labels), Counter())),
        )
        entries.append(entry)
    return entries


def _number(name: str, by_seed: Sequence[Sequence[Run]], numbers: Mapping[str, Numbers]) -> Number | None:
    of_turns = max if name in WORST else median
    return Number.of([_of_seed([numbers[run.label][name] for run in runs], of_turns) for runs in by_seed])


def _of_seed(turns: Sequence[float | None], of_turns: Callable[[Sequence[float]], float]) -> float | None:
    """Returns one value for several runs with one seed; None if one of them has none."""
    known = [value for value in turns if value is not None]
    return of_turns(known) if len(known) == len(turns) else None
