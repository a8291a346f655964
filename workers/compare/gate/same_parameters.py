"""The gate: which rows produced the same parameters, so that their speeds can be compared.

All synchronous rows compute the same thing: in every step they apply the mean gradient of the same batch
once. Only the order of the additions differs, so their parameters can differ by rounding only. Training
amplifies differences, with some seeds 10,000 times in a few hundred steps. So the gate compares rows after
their first steps (`hubring.workers.compare.run.outcome.EARLY`) and only reports the difference at the end.
The hub reduces in rank order, so a second run of it must not differ at all, even at the end. On a GPU,
kernels can add in another order in every run. So there the second run is compared like another row.

BatchNorm normalizes with the samples of one worker's part of the batch, and autocast rounds each part by
itself. Then `local` differs from all other rows, which agree with each other, and none of them is wrong.

The comparison cannot see a fault that begins later. So every step of every run is also judged by itself, in
`hubring.workers.compare.gate.step_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
from msgspec import Struct
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from hubring.workers.audit.audit import AUTOCAST
from hubring.workers.audit.step_tap import BATCH_NORM
from hubring.workers.compare.findings import Gate, Pair, StepCheck
from hubring.workers.compare.gate.step_checks import RunCheck, check_runs
from hubring.workers.compare.plan import run_order
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import EARLY, RunOutcome


def device(outcome: RunOutcome) -> str:
    """Returns where the parameters of a run were, `cpu` or `cuda`; empty if no worker recorded it."""
    found = {result["device"] for result in outcome.results if result and result.get("device")}
    return ", ".join(sorted(found))


_ADVICE = {
    BATCH_NORM: (
        "its BatchNorm layers see one worker's part of the batch, and local's see the whole batch. To compare"
        " with local too, use hubring.horovod.SyncBatchNorm, GroupNorm or LayerNorm"
    ),
    AUTOCAST: (
        "autocast rounds each worker's part of the batch by itself. To compare with local too, run once"
        " without autocast, or allow more with --tolerance"
    ),
}


def excused(runs: Sequence[PlannedRun], pairs: Sequence[Pair], checks: Mapping[str, RunCheck]) -> str:
    """Returns why `local` differs by right, and what to do, as a sentence; empty if it does not.

    Args:
        runs: The runs that are compared. The first one is the reference.
        pairs: The comparisons with it.
        checks: The runs' steps by label.
    """
    known = [checks[run.label] for run in runs if run.label in checks]
    if len(runs) < 2 or runs[0].row.name != "local" or all(pair.passed for pair in pairs):
        return ""
    if len(known) < len(runs) or not all(each.checked.complete for each in known):
        return ""
    facts = frozenset[str]().union(*(each.facts for each in known))
    reasons = [_ADVICE[fact] for fact in (BATCH_NORM, AUTOCAST) if fact in facts]
    return f"The other rows differ from local by right: {'; '.join(reasons)}." if reasons else ""


Parameters = Mapping[str, Tensor]
"""A model's parameters by name, on the CPU."""

TOLERANCE = 1e-4
"""Allowed difference of two synchronous rows: max |a - b| / max |a|, per tensor.

One sum in float32 rounds by 6e-8, and the batch is summed in another order in every step. A single process
that adds the two halves of every batch differed from itself by 2e-7 to 3e-7 after 22 steps and by 5e-7 to
2e-3 after 660 steps (digits, seeds 0 to 3). Losing, doubling or halving the first gradient still shows as
5e-2 after 440 steps. The limit lies between. A fault of the hub after these steps shows in its second run,
unless it repeats exactly.

The wider a layer, the more of its ReLUs are so close to zero that rounding flips one, and with it a sample's
gradient through it. With 16,000 hidden units, 548 of 8 million elements differed by up to 2.4e-4 after 20
steps, all of them in the rows and columns of a few units. A lost gradient changes nearly all elements.
`experiment.tolerance` is for such models.
"""

STEP_TOLERANCE = 1e-4
"""Allowed difference of one step's update, relative to the update."""

AGAIN = "again"
"""Marks the second run of a row."""


class LabelledPair(NamedTuple):
    """A pair with the labels of its runs.

    Attributes:
        pair: The comparison.
        run: Label of the run that is judged.
        reference: Label of the reference run, if it can be the wrong one; None for a single process or
            for the same row.
    """

    pair: Pair
    run: str
    reference: str | None = None

    def excused(self, advice: str) -> LabelledPair:
        """Returns a pair that passes because its rows differ by right."""
        return self._replace(pair=replace(self.pair, passed=True, advice=advice))


class Judgement(Struct, frozen=True):
    """All comparisons, and which speeds they allow to be shown."""

    held: Sequence[LabelledPair]
    tolerance: float
    checks: Mapping[str, StepCheck] = {}
    """The runs' steps, by label."""

    @property
    def gate(self) -> Gate:
        """The result of all pairs and of all steps."""
        pairs, steps = [each.pair for each in self.held], list(self.checks.values())
        found = Gate(True, self.tolerance, pairs, steps)
        return replace(found, passed=found.agree and found.right)

    def closed_to(self, runs: Collection[str]) -> str | None:
        """Returns why the speed of these runs, by label, is withheld; None if it is not.

        If two runs differ, either can be wrong. So the reference's speed is shown only if another row agrees
        with it.
        """
        wrong = [str(self.checks[run]) for run in runs if run in self.checks and not self.checks[run].passed]
        upheld = {each.reference for each in self.held if each.pair.passed}
        failed = [
            str(each.pair)
            for each in self.held
            if not each.pair.passed and (each.run in runs or each.reference in set(runs) - upheld)
        ]
        return "; ".join([*wrong, *failed]) or None

    def wrong(self, runs: Collection[str]) -> int | None:
        """Returns how many elements of these runs, by label, exceed the limit; None if none were compared."""
        found = [each.pair.wrong for each in self.held if each.run in runs]
        return sum(found) if found else None


def judge(
    experiment: Experiment,
    outcomes: Mapping[str, RunOutcome],
    checking: Callable[[str], None] = lambda _: None,
) -> Judgement:
    """Compares synchronous rows, by setting, seed and turn, with `local` or else the first one.

    The hub is also compared with itself.

    A row that lost a worker received fewer gradients than the others, so settings with a fault have no
    pairs. A run that diverged saved no parameters, so it has no pairs either.

    Args:
        experiment: The experiment.
        outcomes: By label.
        checking: Called with the label of each run before its steps are judged.
    """
    tolerance = experiment.tolerance or TOLERANCE
    # Rounding that training amplifies does not show in a single step, so its limit is constant.
    checks = check_runs(outcomes, STEP_TOLERANCE, checking)
    found: dict[tuple[str, str], LabelledPair] = {}
    for setting in experiment.settings:
        turns = product(experiment.seeds, range(experiment.repeats)) if setting.fault is None else ()
        for seed, turn in turns:
            asked = [PlannedRun(row.meets(setting), row, seed, turn) for row in experiment.ways if row.exact]
            known = ((run, outcomes[run.label]) for run in asked)
            runs = [run for run, each in known if not (each.diverged or each.unseen)]
            runs.sort(key=lambda run: run.row.name != "local")  # a single process is the best reference
            by_label = {run.row.name: run.label for run in runs}
            fresh = [run for run in runs[1:] if (runs[0].label, run.label) not in found]
            group = [_compare(runs[0], run, setting.key, outcomes, tolerance) for run in fresh]
            if advice := excused(runs, [held.pair for held in group], checks):
                rest = [_compare(runs[1], run, setting.key, outcomes, tolerance) for run in runs[2:]]
                if all(held.pair.passed for held in rest):
                    group = [held if held.pair.passed else held.excused(advice) for held in group]
                group += rest
            for held in group:
                found[by_label[held.pair.first], held.run] = held
    steps = {label: step_check(each) for label, each in checks.items()}
    again = _again(experiment, outcomes, tolerance)
    return Judgement((*found.values(), *again), tolerance, steps)


def step_check(check: RunCheck) -> StepCheck:
    """Returns what the report says of the steps of a run."""
    run, checked = check.run, check.checked
    return StepCheck(
        setting=run.setting.key,
        row=run.row.name,
        seed=run.seed,
        turn=run.turn,
        steps=checked.taken,
        judged=checked.judged,
        unjudged=checked.unjudged,
        fault=checked.fault,
        step=checked.step,
        advice=check.advice,
    )


def _compare(
    reference: PlannedRun, run: PlannedRun, setting: str, outcomes: Mapping[str, RunOutcome], limit: float
) -> LabelledPair:
    """Compares two runs after their first steps, or bit by bit at the end if the limit is 0."""
    left, right = outcomes[reference.label], outcomes[run.label]
    ends = difference(load_file(left.parameters), load_file(right.parameters), limit)
    found = difference(load_file(left.early), load_file(right.early), limit) if limit else ends
    pair = Pair(
        setting=setting,
        seed=run.seed,
        first=reference.row.name,
        second=run.row.name,
        difference=_finite(found.apart),
        tensor=found.tensor,
        limit=limit,
        wrong=found.wrong,
        steps=EARLY if limit and left.early != left.parameters else None,
        final=_finite(ends.apart),
        turn=run.turn,
        passed=found.apart <= limit,  # False for NaN
    )
    return LabelledPair(pair, run.label, None if reference.row.name == "local" else reference.label)


def _again(
    experiment: Experiment, outcomes: Mapping[str, RunOutcome], tolerance: float
) -> Iterator[LabelledPair]:
    """Compares the two runs of hub-bsp with each seed."""
    for first, second in run_order.again(experiment):
        left = outcomes[first.label]
        if first.row.name == run_order.AGAIN and not (left.diverged or outcomes[second.label].diverged):
            limit = tolerance if "cuda" in device(left) else 0.0
            pair = _compare(first, second, first.setting.key, outcomes, limit).pair
            yield LabelledPair(replace(pair, second=f"{first.row.name} {AGAIN}", turn=0), first.label)


class ModelDifference(NamedTuple):
    """How far two models are apart.

    Attributes:
        apart: The largest max |a - b| / max |a| of any tensor; infinite if the models do not match.
        tensor: That tensor, or why the models do not match.
        wrong: How many elements are apart by more than the limit, or NaN; all if the models do not match.
    """

    apart: float
    tensor: str
    wrong: int


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def difference(first: Parameters, second: Parameters, limit: float) -> ModelDifference:
    """Compares two models; with the limit 0 bit by bit."""
    if misfit := _misfit(first, second):
        return ModelDifference(math.inf, misfit, sum(tensor.numel() for tensor in first.values()))
    apart = {
        name: _relative(first[name], second[name], exact=not limit) for name in first if first[name].numel()
    }
    most = {name: each.max().item() for name, each in apart.items()}
    worst = max(most, key=lambda name: math.inf if math.isnan(most[name]) else most[name], default="")
    wrong = sum(int((~(each <= limit)).sum()) for each in apart.values())
    return ModelDifference(most.get(worst, 0.0), worst if most.get(worst) else "any tensor", wrong)


def _misfit(first: Parameters, second: Parameters) -> str | None:
    """Returns what makes two models incomparable; None if nothing does."""
    if first.keys() != second.keys() or not first:
        return f"the names of its tensors ({', '.join(sorted(first.keys() ^ second.keys())) or 'none'})"
    for name in first:
        if first[name].shape != second[name].shape or first[name].dtype != second[name].dtype:
            return f"shape or dtype of {name}"
    return None


def _relative(first: Tensor, second: Tensor, *, exact: bool) -> Tensor:
    """Returns |a - b| / max |a| of every element; infinite for a difference from all zeros.

    Args:
        first: The reference.
        second: As many values of the same dtype.
        exact: Whether elements with different bits are never 0 apart, and those with the same always are.
    """
    apart, scale = (first - second).double().abs(), first.double().abs().max()
    found = torch.where(apart == 0, apart, apart / scale)
    if not exact:
        return found
    one, other = (each.contiguous().unsqueeze(-1).view(torch.uint8) for each in (first, second))
    return torch.where((one == other).all(-1), 0.0, found.clamp(min=5e-324))
