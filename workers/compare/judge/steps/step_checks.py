"""Judges the recorded steps of all runs of an experiment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.judge.steps import asynchronous, recorded, shares, synchronous
from hubring.workers.compare.judge.steps.checked import Checked, Fault
from hubring.workers.compare.judge.steps.recorded import RecordedStep, Recording
from hubring.workers.compare.run.outcome import Line, Outcome


@dataclass(frozen=True, slots=True)
class RunCheck:
    """The steps of one run.

    Attributes:
        run: The run.
        checked: What its steps show.
        facts: What makes a rank's gradients differ, by right, from those of the whole batch.
        advice: What could not be judged, in a sentence; empty if nothing.
    """

    run: Run
    checked: Checked
    facts: frozenset[str] = frozenset()
    advice: str = ""


def check_runs(outcomes: Mapping[str, Outcome], tolerance: float) -> dict[str, RunCheck]:
    """Returns the checks by label, of the runs that recorded their steps.

    A run that lost a process or diverged has none, and neither has a row with compressed gradients or backup
    workers, whose steps need not be those of the mean gradient.

    Args:
        outcomes: By label.
        tolerance: Allowed difference of an update, relative to the update.
    """
    found: dict[str, RunCheck] = {}
    alone: dict[tuple[int, int], Sequence[RecordedStep]] = {}
    # A single process comes first: others are compared with it.
    for outcome in sorted(outcomes.values(), key=lambda each: each.run.row.name != "local"):
        ranks = _recordings(outcome)
        if not ranks:
            continue
        place = _place(outcome.run)
        if outcome.run.row.name == "local":
            alone[place] = ranks[0].trainers.get(0, ())
        found[outcome.run.label] = check_run(
            outcome.run, ranks, outcome.records, tolerance, alone.get(place, ())
        )
    return without_strangers({label: found[label] for label in outcomes if label in found})


def check_run(
    run: Run,
    ranks: Sequence[Recording],
    records: Sequence[Sequence[Line]],
    tolerance: float,
    alone: Sequence[RecordedStep] = (),
) -> RunCheck:
    """Judges one run.

    Args:
        run: The run.
        ranks: Every rank's recording.
        records: Every rank's reports.
        tolerance: Allowed difference of an update, relative to the update.
        alone: The steps of a single process with the same batches; empty without one.
    """
    steps = [rank.trainers for rank in ranks]
    checked = (synchronous if run.row.exact else asynchronous).check(steps, tolerance)
    facts = frozenset[str]().union(*(rank.facts for rank in ranks))
    if not run.row.exact or checked.fault or len(ranks) < 2:
        return RunCheck(run, checked, facts)
    samples = _samples(records)
    try:
        first = [each.get(0, ()) for each in steps]
        twin, unknown = shares.same_samples(first, alone), shares.uneven(first, samples, alone)
    except Fault as fault:
        return RunCheck(run, replace(checked, fault=fault.text, step=fault.step), facts)
    return RunCheck(run, checked, facts, _advice(run.row.name, twin, unknown, samples))


def _place(run: Run) -> tuple[int, int]:
    """Returns what is equal for runs that take the same batches: the workers and the seed."""
    return run.setting.workers, run.seed


def _recorded(outcome: Outcome) -> list[Path]:
    """Returns the files of all ranks; empty if the run did not finish or did not record its steps."""
    files = [outcome.audit(rank) for rank in range(len(outcome.results))]
    whole = not outcome.failed and not outcome.diverged and all(file.exists() for file in files)
    return files if whole else []


def _recordings(outcome: Outcome) -> list[Recording]:
    """Returns the recordings of all ranks; empty if the run's steps are not to be judged."""
    run, files = outcome.run, _recorded(outcome)
    if not files:
        return []
    if run.setting.fault is not None or (run.row.synchronous and not run.row.exact):
        return []
    ranks = recorded.joined([recorded.read(file) for file in files])
    steps = [one for rank in ranks for each in rank.trainers.values() for one in each[:1]]
    if not steps:
        return []
    if not run.row.exact and any(one.layout.lockstep for one in steps):
        return []  # backup workers
    return ranks


def _samples(records: Sequence[Sequence[Line]]) -> dict[int, list[float]]:
    """Returns every rank's samples by step, of the steps that all ranks reported."""
    ranks = [
        {line["step"]: float(line["samples"]) for line in lines if "samples" in line} for lines in records
    ]
    together = set(ranks[0]).intersection(*ranks) if ranks else set()
    return {step: [rank[step] for rank in ranks] for step in sorted(together)}


def _advice(row: str, twin: int, unknown: Sequence[int], samples: shares.Samples) -> str:
    if twin:
        return (
            f"Ranks 0 and {twin} of {row} computed the same gradients in all steps. If they should train on"
            " other samples, use hubring.ShardedSampler. Add the row local to check this."
        )
    if not unknown:
        return ""
    took = " and ".join(f"{count:g}" for count in samples[unknown[0]])
    return (
        f"In step {unknown[0]} of {row}, workers took {took} samples, and their gradients have the same"
        f" weight. If the script does not weigh its loss, {shares.FIX}. Add the row local to check this."
    )


def without_strangers(checks: dict[str, RunCheck]) -> dict[str, RunCheck]:
    """Finds runs whose parameters changed between two steps, where those of other rows did not.

    A script may change parameters itself. It then does so in every row.
    """
    alike: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for label, each in checks.items():
        if each.run.row.exact:
            alike[_place(each.run)].append(label)
    for labels in alike.values():
        scripts = _common(checks[label].checked.written for label in labels)
        for label in labels:
            check = checks[label]
            strange = check.checked.written - scripts
            if strange and not check.checked.fault:
                text = "parameters changed between the last step and this one, and in other rows they did not"
                checks[label] = replace(check, checked=replace(check.checked, fault=text, step=min(strange)))
    return checks


def _common(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    first, *others = sets
    return first.intersection(*others)
