"""From the outcomes of an experiment to its findings, from which all reports are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec.structs import replace

from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.job import Job
from hubring.workers.compare.judge import gate
from hubring.workers.compare.judge.bandwidth import bandwidth
from hubring.workers.compare.judge.curve import curve
from hubring.workers.compare.judge.gate import Judgement
from hubring.workers.compare.judge.measure import Numbers, staleness, steps_of
from hubring.workers.compare.judge.predictions import predicted
from hubring.workers.compare.judge.summary import summarise
from hubring.workers.compare.judge.verdict import verdict
from hubring.workers.compare.result.findings import Curve, Entry, Findings, Load, Noise
from hubring.workers.compare.run import noise
from hubring.workers.compare.run.outcome import Outcome


def results(
    experiment: Experiment,
    outcomes: Mapping[str, Outcome],
    numbers: Mapping[str, Numbers],
    machine: Mapping[str, Any],
    command: str,
    constants: Constants | None = None,
) -> Findings:
    """Judges the runs, summarises them and writes the verdict.

    Args:
        experiment: The experiment.
        outcomes: By label, in the order of the runs.
        numbers: Result of `measure` for each run, by label.
        machine: Description of the machine.
        command: The command that the user typed.
        constants: Constants of the machine; None: not measured, so nothing is predicted.
    """
    job, judged = experiment.yardstick, gate.judge(experiment, outcomes)
    counts = {label: staleness(outcome) for label, outcome in outcomes.items()}
    failures = {
        label: why for label, each in outcomes.items() if (why := _failure(each, numbers[label], job))
    }
    rows = summarise(experiment, judged, numbers, counts, failures)
    measured = Findings(
        command=command,
        asked=experiment,
        job=job,
        machine=dict(machine),
        noise=_noise(list(outcomes.values()), rows),
        settings=experiment.settings,
        gate=judged.gate,
        rows=rows,
        curves=list(_curves(experiment, outcomes, judged, job)),
        bandwidth=bandwidth(experiment, outcomes, judged, rows),
        commands={label: list(outcome.commands) for label, outcome in outcomes.items()},
    )
    found = predicted(measured, constants)
    return replace(found, verdict=verdict(found))


def _failure(outcome: Outcome, numbers: Numbers, job: Job) -> str | None:
    """Returns why a run has no comparable end; None if it has one."""
    if outcome.failed is not None or numbers["final_metric"] is not None:
        return outcome.failed
    return f"its last {job.metric} is not finite"


def _curves(
    experiment: Experiment, outcomes: Mapping[str, Outcome], judged: Judgement, job: Job
) -> Iterator[Curve]:
    """Returns curves of the first turn; a run that counts in several settings is drawn in the first."""
    for label, outcome in outcomes.items():
        run = outcome.run
        if run.turn or judged.closed_to({label}) or not all(map(steps_of, outcome.records)):
            continue
        key = next(each.key for each in experiment.settings if run.row.meets(each) == run.setting)
        yield curve(outcome, key, job.metric)


def _noise(outcomes: Sequence[Outcome], rows: Sequence[Entry]) -> Noise:
    loads = [load for outcome in outcomes for load in outcome.noise.load]
    foreign = [outcome.noise.foreign for outcome in outcomes if outcome.noise.foreign is not None]
    disturbed = [outcome.run.label for outcome in outcomes if (outcome.noise.foreign or 0.0) > noise.FOREIGN]
    warnings = []
    if disturbed:
        warnings.append(
            f"In {len(disturbed)} of {len(outcomes)} runs other programs used more than {noise.FOREIGN:.0%}"
            f" of the machine, up to {max(foreign):.0%} ({', '.join(disturbed[:3])}"
            f"{' and others' if len(disturbed) > 3 else ''}). Repeat them on an idle machine."
        )
    return Noise(
        load=Load(median(loads), max(loads)),
        foreign=Load(median(foreign), max(foreign)) if foreign else None,
        spread=_spread(rows),
        quiet=not disturbed,
        said=warnings,
    )


def _spread(rows: Iterable[Entry]) -> dict[str, float | None]:
    """Returns the range of step times over seeds, relative to their median: the worst setting's."""
    spread: dict[str, float | None] = {}
    for row in rows:
        step = row.number("step_ms")
        if step is not None and step.seeds > 1:
            known = [value for value in step.values if value is not None]
            apart = (max(known) - min(known)) / step.median
            spread[row.row] = max(apart, spread.get(row.row) or 0.0)
    return spread
