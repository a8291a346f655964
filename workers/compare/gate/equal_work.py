"""Whether runs are complete and had equal conditions, without which their speeds cannot be compared.

Law: runs are compared with each other, never with a list of good values. A run is odd if it is unlike at
least half of its group. So one odd row is named, and of two rows that differ both are.

- Complete: every rank reported its steps, no fewer than other runs with as many workers and the same seed,
  and left the record of each for the gate.
- Conditions: what `hubring.workers.runtime.conditions` recorded on each rank, and the device.
- Work: reports count the samples that the model got, in all runs alike. Rows that must agree end with the
  same metric, and drift apart as rounding does.

What was not recorded, as by earlier versions, is not compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from functools import partial
from itertools import chain, product, repeat
from operator import eq, ge
from typing import Any, NamedTuple

from hubring.workers.audit.audit_file import AuditStep, ModelLayout, read_audit
from hubring.workers.compare.findings import StepCheck
from hubring.workers.compare.gate.same_parameters import Judgement, device, step_check
from hubring.workers.compare.gate.step_checks import RunCheck
from hubring.workers.compare.gate.step_reference import Checked
from hubring.workers.compare.measure import Numbers, lacking, steps_of, taken_by
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.run_order import PlannedRun, counted
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.run.outcome import RunOutcome, audit_file
from hubring.workers.runtime.conditions import DELAYS, EXCHANGE

Outcomes = Mapping[str, RunOutcome]
"""Runs by label."""

METRIC_ALIKE, SPREADS = 0.05, 3.0
"""Differences of final metrics that rounding explains: as a share of the metric, or of its range in training,
and as a multiple of its range over the seeds."""

DEVICE = "device (move the model and every batch to hubring.device())"
STEPPED = "dtype of the steps (hub-aggregate steps as ring; or train a float32 model)"
UNIT = "reported samples for each that the model got"

STRAYED, BEYOND = 0.05, 1000.0
"""Rounding moves no row so far, and so many times as far as most others."""


class _Value(NamedTuple):
    """What is compared, and where it was found."""

    run: PlannedRun
    value: Any
    rank: int | None = None

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{value} {'in' if self.rank is None else f'on rank {self.rank} of'} {self.run.row.name}"


_Groups = defaultdict[tuple[str, Callable[[Any, Any], bool], Hashable], list[_Value]]
"""Values to compare with each other: by what they are, when two are alike, and what the runs share."""


def _odd(groups: _Groups, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns why runs are odd, as a clause, by label; first of those unlike more than half.

    Args:
        groups: What is compared.
        known: Runs that are known to be odd; None: no run is.
    """
    found = dict(known or {})
    for more, ((what, alike, _), every) in product((1, 0), groups.items()):
        group = [one for one in every if one.run.label not in found]
        for one in group if len({each.value for each in group}) > 1 else ():
            unlike = [other for other in group if not alike(one.value, other.value)]
            if 2 * len(unlike) >= len(group) + more:
                found.setdefault(one.run.label, f"{what}: {one}, and {unlike[0]} (seed {one.run.seed})")
    return found


def incomplete(experiment: Experiment, outcomes: Outcomes) -> dict[str, str]:
    """Returns why runs count as failed, by label: they lack reports or steps."""
    known = ((label, each) for label, each in outcomes.items() if not each.diverged)
    found = {label: why for label, each in known if (why := lacking(each, experiment.yardstick))}
    groups: _Groups = defaultdict(list)
    for each in _ended(outcomes, found):
        same = each.run.setting.workers, each.run.seed
        left_out = taken_by(each) if each.run.row.backup else repeat(0)  # its late workers leave out steps
        for rank, (record, taken) in enumerate(zip(each.records, left_out, strict=False)):
            steps = max(len(steps_of(record)), taken)
            groups["reported steps", ge, same].append(_Value(each.run, steps, rank))
    return _odd(groups) | found


def unrecorded(outcomes: Outcomes, checks: Mapping[str, StepCheck]) -> dict[str, StepCheck]:
    """Returns checks that fail, of runs without a record of all steps; none if no run has a record."""
    found: dict[str, StepCheck] = {}
    for each in _ended(outcomes) if checks else ():
        run, taken = each.run, taken_by(each)
        steps = max(taken) if run.row.exact else sum(taken)
        check = checks.get(run.label)
        judges = run.row.exact or not (run.row.synchronous or run.row.backup)
        if judges and not each.unseen and (check is None or (check.passed and check.steps < steps)):
            lost = (rank for rank in range(len(taken)) if not audit_file(each.folder, rank).exists())
            why = f"rank {next(lost, 0)} left no record of its steps, so that none was judged"
            why = why if check is None else f"its record has {check.steps} of {steps} steps"
            checked = Checked(steps, 0 if check is None else check.judged, fault=why)
            found[run.label] = step_check(RunCheck(run, checked))
    return found


def unequal(
    experiment: Experiment,
    outcomes: Outcomes,
    numbers: Mapping[str, Numbers],
    judged: Judgement,
    failed: Collection[str],
) -> dict[str, str]:
    """Returns why the speeds of runs are withheld, by label, though each of their steps is right."""
    groups: _Groups = defaultdict(list)
    unseen = [each for each in outcomes.values() if each.unseen]
    for each in _ended(outcomes, failed):
        run = each.run
        if run.turn >= experiment.repeats:
            continue  # a row's second run would count twice
        for rank, known in _conditions(each):
            for name, value in known.items():
                # Only Hubring's rows have such an exchange.
                if name != EXCHANGE or run.row.server is not None:
                    asked = name == DELAYS and value == str(run.slowness)
                    one = _Value(run, "as asked" if asked else value, rank)
                    groups[name, _alike, (run.setting.workers, rank)].append(one)
        if place := device(each):
            groups[DEVICE, eq, ()].append(_Value(run, place))
        if dtypes := _stepped(each):
            groups[STEPPED, eq, ()].append(_Value(run, dtypes))
    for pair, label in ((held.pair, held.run) for held in judged.held if held.run not in failed):
        if pair.limit and pair.steps and pair.passed and not pair.advice:
            what, turn = f"difference from {pair.first} at the end", (pair.setting, pair.seed, pair.turn)
            groups[what, _is_rounding, turn].append(_Value(outcomes[label].run, float(pair.final)))
    excused = {held.pair.first for held in judged.held if held.pair.advice}
    for setting in (each for each in experiment.settings if each.fault is None):
        _add_ends(groups, experiment, setting, outcomes, numbers, excused)
    known = {each.run.label: f"the gate could not check it: {each.unseen}" for each in unseen}
    return _odd(groups, known | _add_units(groups, _ended(outcomes, failed)))


def _add_units(groups: _Groups, outcomes: Iterator[RunOutcome]) -> dict[str, str]:
    """Adds what a reported sample is; returns the runs, by label, whose ranks each report the whole batch.

    Models can take a batch along another dimension than the first. So only rows with as many ranks are alike.
    """
    units = [(each.run, len(each.results), unit) for each in outcomes if (unit := _unit(each))]
    alone = {(run.setting.workers, run.seed): unit for run, ranks, unit in units if ranks == 1}
    found: dict[str, str] = {}
    for run, ranks, unit in units:
        same = run.setting.workers, run.seed
        groups[UNIT, _close, (*same, ranks)].append(_Value(run, unit))
        if ranks > 1 and _close(unit, ranks) and _close(alone.get(same, 1.0), 1.0):
            found[run.label] = f"{UNIT}: {ranks} in {run.row.name}, which has {ranks} ranks (seed {run.seed})"
    return found


def _add_ends(
    groups: _Groups,
    experiment: Experiment,
    setting: Setting,
    outcomes: Outcomes,
    numbers: Mapping[str, Numbers],
    excused: Collection[str],
) -> None:
    """Adds the final metrics of rows that must agree."""
    ends, ranges = list[_Value](), list[float]()
    for row in (each for each in experiment.ways if each.exact and each.name not in excused):
        runs = [run for seed in experiment.seeds for run in counted(experiment, setting, row, seed)]
        known = [(run, end) for run in runs if (end := numbers[run.label]["final_metric"]) is not None]
        ranges += [max(end for _, end in known) - min(end for _, end in known)] if known else []
        ends += [_Value(*each) for each in known]
    metric = experiment.yardstick.metric
    lines = [line for one in ends for line in outcomes[one.run.label].records[0] if metric in line]
    course = sorted(line[metric] for line in lines)  # an error that is nearly zero differs by large shares
    least = max(SPREADS * min(ranges), METRIC_ALIKE * (course[-1] - course[0])) if course else 0.0
    alike = partial(_near, least, METRIC_ALIKE)
    for one in ends:
        groups[f"final {metric}", alike, (one.run.seed, one.run.turn)].append(one)


def recorded(outcomes: Outcomes) -> dict[str, str]:
    """Returns the conditions of all runs by name, several values of one with commas."""
    values = defaultdict[str, dict[str, None]](dict)
    for _, known in chain.from_iterable(map(_conditions, outcomes.values())):
        for name, value in known.items():
            values[name][str(value)] = None
    return {name: ", ".join(each) for name, each in values.items()}


def _ended(outcomes: Outcomes, failed: Collection[str] = ()) -> Iterator[RunOutcome]:
    """Yields the runs that finished, in settings without a fault."""
    for label, each in outcomes.items():
        ended = each.failed is None and not each.diverged and each.run.setting.fault is None
        if ended and label not in failed:
            yield each


def _conditions(outcome: RunOutcome) -> list[tuple[int, Mapping[str, Any]]]:
    """Returns the ranks that recorded their conditions."""
    results = enumerate(outcome.results)
    return [(rank, each["conditions"]) for rank, each in results if each and each.get("conditions")]


def _stepped(outcome: RunOutcome) -> str:
    """Returns the dtypes that rank 0's parameters are stepped in at the start; empty: not known."""
    path = audit_file(outcome.folder, 0)
    layouts = (each for each in read_audit(path) if isinstance(each, ModelLayout)) if path.exists() else ()
    return next((", ".join(sorted({*each.stepped})) for each in layouts), "")


def _unit(outcome: RunOutcome) -> float:
    """Returns the reported samples for each that the model got; 0: it is not known."""
    got, both = 0, 0.0
    for rank, record in enumerate(outcome.records):
        samples: Counter[int] = Counter()
        for line in steps_of(record):  # several in a step that accumulates gradients
            samples[line["step"]] += line["samples"]
        path = audit_file(outcome.folder, rank)
        entries = read_audit(path) if path.exists() else ()
        for step in (each for each in entries if isinstance(each, AuditStep) and each.step in samples):
            if step.trainer == 0 and step.samples > 0:
                got, both = got + step.samples, both + samples[step.step]
    return both / got if got else 0.0


def _near(least: float, share: float, one: Any, other: Any) -> bool:
    """Whether texts are equal, or numbers apart by at most `least`, or by this share of the larger one."""
    if isinstance(one, str):
        return bool(one == other)
    return bool(abs(one - other) <= max(least, share * max(abs(one), abs(other))))


_alike, _close = partial(_near, 0.1, 0.25), partial(_near, 0.0, 0.01)
"""Whether conditions per step are so close that the rest does not matter, and whether units are the same."""


def _is_rounding(one: float, other: float) -> bool:
    """Whether a row can differ so much at the end by rounding, where another one differs by `other`."""
    return one <= max(STRAYED, BEYOND * other)
