"""From the outcomes of an experiment to its findings, from which all reports are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec.structs import replace

from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.job import Job
from hubring.workers.compare.experiment.plan import again
from hubring.workers.compare.judge import gate
from hubring.workers.compare.judge.answer import answer
from hubring.workers.compare.judge.bandwidth import bandwidth
from hubring.workers.compare.judge.curve import curve
from hubring.workers.compare.judge.gate import Judgement
from hubring.workers.compare.judge.measure import Numbers, staleness
from hubring.workers.compare.judge.predictions import predicted
from hubring.workers.compare.judge.scaling import won_from
from hubring.workers.compare.judge.summary import summarise
from hubring.workers.compare.judge.verdict import verdict
from hubring.workers.compare.result.clock import worst
from hubring.workers.compare.result.comparisons import Comparisons
from hubring.workers.compare.result.family import Family
from hubring.workers.compare.result.findings import Curve, Entry, Findings
from hubring.workers.compare.result.noise import Load, Noise, Repeat
from hubring.workers.compare.run import noise
from hubring.workers.compare.run.outcome import Outcome


def results(
    experiment: Experiment,
    outcomes: Mapping[str, Outcome],
    numbers: Mapping[str, Numbers],
    machine: Mapping[str, Any],
    command: str,
    constants: Constants | None = None,
    checking: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Judges the runs, summarises them and writes the verdict.

    Args:
        experiment: The experiment.
        outcomes: By label, in the order of the runs.
        numbers: Result of `measure` for each run, by label.
        machine: Description of the machine.
        command: The command that the user typed.
        constants: Constants of the machine; None: not measured, so nothing is predicted.
        checking: Called with the label of each run before its steps are judged.
    """
    job, judged = experiment.yardstick, gate.judge(experiment, outcomes, checking)
    counts = {label: staleness(outcome) for label, outcome in outcomes.items()}
    failures = {
        label: why for label, each in outcomes.items() if (why := _failure(each, numbers[label], job))
    }
    disturbed = _disturbed(outcomes)
    rows = summarise(experiment, judged, numbers, counts, failures, disturbed)
    measured = Findings(
        command=command,
        asked=experiment,
        job=job,
        machine=dict(machine),
        noise=_noise(list(outcomes.values()), rows, disturbed, _repeat(experiment, judged, numbers)),
        settings=experiment.settings,
        gate=judged.gate,
        rows=rows,
        curves=list(_curves(experiment, outcomes, judged, failures)),
        bandwidth=bandwidth(experiment, outcomes, judged, rows),
        commands={label: list(outcome.commands) for label, outcome in outcomes.items()},
        scripts={label: outcome.script for label, outcome in outcomes.items() if outcome.script},
        clocks=worst(outcome.clocks for outcome in outcomes.values()),
    )
    found, family = predicted(measured, constants), Family()
    return family.settle(lambda: _judged(found, family))


def _judged(found: Findings, family: Family) -> Findings:
    """Returns the findings with what the comparisons decide."""
    crossed = replace(found, crossover=won_from(Comparisons(found, family)))
    compared = Comparisons(crossed, family)
    return replace(crossed, verdict=verdict(compared), answer=answer(compared))


def _failure(outcome: Outcome, numbers: Numbers, job: Job) -> str | None:
    """Returns why a run has no comparable end; None if it has one."""
    if outcome.failed is not None or numbers["final_metric"] is not None:
        return outcome.failed
    return f"its last {job.metric} is not finite"


def _curves(
    experiment: Experiment,
    outcomes: Mapping[str, Outcome],
    judged: Judgement,
    failures: Collection[str],
) -> Iterator[Curve]:
    """Returns curves of the first turn; a run that counts in several settings is drawn in the first.

    A run that failed has none: its end is not that of its row, and would end the line of the other seeds.
    """
    for label, outcome in outcomes.items():
        run = outcome.run
        if run.turn or label in failures or judged.closed_to({label}):
            continue
        key = next(each.key for each in experiment.settings if run.row.meets(each) == run.setting)
        yield curve(outcome, key, experiment.yardstick.metric)


def _disturbed(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Returns what disturbed runs, by label. Clock rates of one machine in equal runs are compared."""
    fastest: dict[Hashable, float] = {}
    for one in outcomes.values():
        for each in one.noise:
            if each.megahertz is not None:
                fastest[_equal(one, each)] = max(each.megahertz, fastest.get(_equal(one, each), 0.0))
    found = {
        label: next(
            filter(None, (each.disturbance(fastest.get(_equal(one, each))) for each in one.noise)), ""
        )
        for label, one in outcomes.items()
    }
    return {label: why for label, why in found.items() if why}


def _equal(outcome: Outcome, heard: noise.Noise) -> Hashable:
    """Returns what is equal for runs that load a machine alike."""
    return outcome.run.setting.key, outcome.run.row.name, heard.machine


def _noise(
    outcomes: Sequence[Outcome], rows: Sequence[Entry], disturbed: Mapping[str, str], repeat: Repeat | None
) -> Noise:
    heard = [each for outcome in outcomes for each in outcome.noise]
    load = _load([load for each in heard for load in each.load])
    assert load is not None
    said = []
    if disturbed:
        label, why = next(iter(disturbed.items()))
        said.append(
            f"{len(disturbed)} of {len(outcomes)} runs were disturbed: in {label}, {why}. Repeat the"
            " experiment on a machine that does nothing else."
        )
    return Noise(
        load=load,
        foreign=_load([each.foreign for each in heard]),
        stolen=_load([each.stolen for each in heard]),
        stalled=_load([each.stalled for each in heard]),
        spread=_spread(rows),
        repeat=repeat,
        quiet=not disturbed,
        said=said,
        gpus=any(map(_on_gpus, outcomes)),
    )


def _on_gpus(outcome: Outcome) -> bool:
    """Whether a worker held memory of a GPU at its end."""
    return any(each and each.get("usage", {}).get("gpu_bytes") for each in outcome.results)


def _load(values: Sequence[float | None]) -> Load | None:
    known = [value for value in values if value is not None]
    return Load(median(known), max(known)) if known else None


def _repeat(experiment: Experiment, judged: Judgement, numbers: Mapping[str, Numbers]) -> Repeat | None:
    """Returns by how much two runs of one row differ; None if a run has no speed."""
    pairs = again(experiment)
    speeds = [[numbers[run.label]["samples_per_second"] for run in pair] for pair in pairs]
    ratios = [second / first for first, second in speeds if first and second]
    if not ratios or judged.closed_to({run.label for pair in pairs for run in pair}):
        return None
    run = pairs[0][0]
    return Repeat(run.setting.key, run.row.name, ratios)


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
