"""Results: `results.json`, version 3, from the outcomes of an experiment; everything else is made from it.

version      3
command      repeats the experiment
experiment   as `Experiment.as_json`
job          the yardstick: metric, title, target, rising, samples
machine      what it ran on, versions included
noise        load, spread of step times by row, quiet, said: sentences
settings     key, and the fields of `Setting`
gate         passed, tolerance, pairs
rows         one object for every row of every setting: as `Summary.as_json`
curves       setting, row, seed; loss, metric: points of seconds, samples and value;
             none of a row whose speed is withheld
commands     label of a run -> the commands that it consisted of
bandwidth    one object for every row of every setting that was timed: as `findings.Bandwidth`
predictions, score, crossover, scaling   what the model of cost says beside what was measured
verdict      sentences
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from hubring.workers.compare.cost.constants import Constants
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.job import Job
from hubring.workers.compare.judge import gate
from hubring.workers.compare.judge.bandwidth import bandwidth
from hubring.workers.compare.judge.curve import curves
from hubring.workers.compare.judge.gate import Gate
from hubring.workers.compare.judge.measure import Numbers, staleness, steps_of
from hubring.workers.compare.judge.predictions import outlook
from hubring.workers.compare.judge.summary import Summary, summarise
from hubring.workers.compare.judge.verdict import verdict
from hubring.workers.compare.result.reading import VERSION
from hubring.workers.compare.run import noise
from hubring.workers.compare.run.outcome import Outcome


def results(
    experiment: Experiment,
    outcomes: Mapping[str, Outcome],
    numbers: Mapping[str, Numbers],
    machine: Mapping[str, Any],
    command: str,
    constants: Constants | None = None,
) -> dict[str, Any]:
    """Judges, sums up and puts into words.

    Args:
        experiment: What was run.
        outcomes: By label, in the order in which they ran.
        numbers: What `measure` made of each, by label.
        machine: On what.
        command: What the user typed.
        constants: What the machine can do; None: it was not measured, and nothing is predicted.
    """
    job, judged = experiment.yardstick, gate.judge(experiment, outcomes)
    counts = {label: staleness(outcome) for label, outcome in outcomes.items()}
    failures = {
        label: said for label, each in outcomes.items() if (said := _failure(each, numbers[label], job))
    }
    summaries = summarise(experiment, judged, numbers, counts, failures)
    found: dict[str, Any] = {
        "version": VERSION,
        "command": command,
        "experiment": experiment.as_json(),
        "job": asdict(job),
        "machine": dict(machine),
        "noise": _noise(list(outcomes.values()), summaries),
        "settings": [{"key": setting.key, **setting.as_json()} for setting in experiment.settings],
        "gate": judged.as_json(),
        "rows": [summary.as_json() for summary in summaries],
        "curves": list(_curves(experiment, outcomes, judged, job)),
        "bandwidth": bandwidth(experiment, outcomes, judged, summaries),
        "commands": {label: list(outcome.commands) for label, outcome in outcomes.items()},
    }
    found |= outlook(found, constants)
    return found | {"verdict": verdict(found)}


def _failure(outcome: Outcome, numbers: Numbers, job: Job) -> str | None:
    """Why a run has no end that could be compared; None: it has."""
    if outcome.failed is not None or numbers["final_metric"] is not None:
        return outcome.failed
    return f"its last {job.metric} is no finite number"


def _curves(
    experiment: Experiment, outcomes: Mapping[str, Outcome], judged: Gate, job: Job
) -> Iterable[dict[str, Any]]:
    """Those of the first turn; a run that counts in several settings is drawn in the first."""
    drawn: set[str] = set()
    for label, outcome in outcomes.items():
        run = outcome.run
        if run.turn or judged.closed_to({label}) or not all(map(steps_of, outcome.records)):
            continue
        key = next(each.key for each in experiment.settings if run.row.meets(each) == run.setting)
        if label not in drawn:
            yield {"setting": key, "row": run.row.name, "seed": run.seed, **curves(outcome, job.metric)}
        drawn.add(label)


def _noise(outcomes: Sequence[Outcome], summaries: Sequence[Summary]) -> dict[str, Any]:
    loads = [load for outcome in outcomes for load in outcome.noise.load]
    foreign = [outcome.noise.foreign for outcome in outcomes if outcome.noise.foreign is not None]
    disturbed = [outcome.run.label for outcome in outcomes if (outcome.noise.foreign or 0.0) > noise.FOREIGN]
    said = []
    if disturbed:
        said.append(
            f"In {len(disturbed)} of {len(outcomes)} runs other programs took more than {noise.FOREIGN:.0%}"
            f" of the machine, up to {max(foreign):.0%} ({', '.join(disturbed[:3])}"
            f"{' and others' if len(disturbed) > 3 else ''}): repeat them on an idle machine."
        )
    return {
        "load": {"median": median(loads), "max": max(loads)},
        "foreign": {"median": median(foreign), "max": max(foreign)} if foreign else None,
        "spread": _spread(summaries),
        "quiet": not disturbed,
        "said": said,
    }


def _spread(summaries: Iterable[Summary]) -> dict[str, float]:
    """How far step times lay apart from seed to seed, relative to their median: the worst setting's."""
    spread: dict[str, float] = {}
    for summary in summaries:
        steps = [value for value in summary.numbers["step_ms"] or () if value is not None]
        if len(steps) > 1:
            apart = (max(steps) - min(steps)) / median(steps)
            spread[summary.row.name] = max(apart, spread.get(summary.row.name, 0.0))
    return spread
