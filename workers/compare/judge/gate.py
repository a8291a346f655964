"""The gate: which rows produced the same parameters, so that their speeds can be compared.

All synchronous rows compute the same thing: in every step they apply the mean gradient of the same batch
once. Only the order of the additions differs, so their parameters can differ by rounding only. Training
amplifies differences, with some seeds 10,000 times in a few hundred steps. So the gate compares rows after
their first steps (`hubring.workers.compare.run.outcome.EARLY`) and only reports the difference at the end.
The hub reduces in rank order, so a second run of it must not differ at all, even at the end. On a GPU,
kernels can add in another order in every run. So there the second run is compared like another row.

The comparison cannot see a fault that begins later. So every step of every run is also judged by itself, in
`hubring.workers.compare.judge.steps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from hubring.workers.compare.experiment import plan
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.judge.batch_dependence import excused
from hubring.workers.compare.judge.devices import device, differing
from hubring.workers.compare.judge.steps.step_checks import RunCheck, check_runs
from hubring.workers.compare.result.findings import Gate, Pair, StepCheck
from hubring.workers.compare.run.outcome import EARLY, Outcome

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


class Held(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Judgement:
    """All comparisons, and which speeds they allow to be shown."""

    held: Sequence[Held]
    tolerance: float
    checks: Mapping[str, StepCheck] = field(default_factory=dict)
    """The runs' steps, by label."""
    devices: str | None = None
    """Why no speed is shown, if rows have trained on different devices."""

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
        return "; ".join([*wrong, *failed]) or self.devices

    def wrong(self, runs: Collection[str]) -> int | None:
        """Returns how many elements of these runs, by label, exceed the limit; None if none were compared."""
        found = [each.pair.wrong for each in self.held if each.run in runs]
        return sum(found) if found else None


def judge(
    experiment: Experiment, outcomes: Mapping[str, Outcome], checking: Callable[[str], None] = lambda _: None
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
    found: dict[tuple[str, str], Held] = {}
    for setting in experiment.settings:
        turns = product(experiment.seeds, range(experiment.repeats)) if setting.fault is None else ()
        for seed, turn in turns:
            asked = [Run(row.meets(setting), row, seed, turn) for row in experiment.ways if row.exact]
            runs = [run for run in asked if not outcomes[run.label].diverged]
            runs.sort(key=lambda run: run.row.name != "local")  # a single process is the best reference
            by_label = {run.row.name: run.label for run in runs}
            fresh = [run for run in runs[1:] if (runs[0].label, run.label) not in found]
            group = list(_against(runs[0], fresh, setting.key, outcomes, tolerance)) if fresh else []
            if advice := excused(runs, [held.pair for held in group], checks):
                others = runs[2:]
                rest = list(_against(runs[1], others, setting.key, outcomes, tolerance)) if others else []
                if all(held.pair.passed for held in rest):
                    group = [held._replace(pair=_with(held.pair, advice)) for held in group]
                group += rest
            for held in group:
                found[by_label[held.pair.first], held.run] = held
    steps = {label: _of_steps(each) for label, each in checks.items()}
    again = _again(experiment, outcomes, tolerance)
    return Judgement((*found.values(), *again), tolerance, steps, differing(outcomes.values()))


def _with(pair: Pair, advice: str) -> Pair:
    """Returns a pair that passes because its rows differ by right."""
    return pair if pair.passed else replace(pair, passed=True, advice=advice)


def _of_steps(check: RunCheck) -> StepCheck:
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


def _against(
    reference: Run, runs: list[Run], setting: str, outcomes: Mapping[str, Outcome], tolerance: float
) -> Iterator[Held]:
    reached = outcomes[reference.label]
    early, final = load_file(reached.early), load_file(reached.parameters)
    for run in runs:
        left = outcomes[run.label]
        judged = load_file(left.early)
        apart, tensor = difference(early, judged)
        pair = Pair(
            setting=setting,
            seed=run.seed,
            first=reference.row.name,
            second=run.row.name,
            difference=_finite(apart),
            tensor=tensor,
            limit=tolerance,
            wrong=0 if apart <= tolerance else wrong(early, judged, tolerance),
            steps=None if reached.early == reached.parameters else EARLY,
            final=_finite(difference(final, load_file(left.parameters))[0]),
            turn=run.turn,
            passed=apart <= tolerance,  # False for NaN
        )
        yield Held(pair, run.label, None if reference.row.name == "local" else reference.label)


def _again(experiment: Experiment, outcomes: Mapping[str, Outcome], tolerance: float) -> list[Held]:
    """Compares the two runs of hub-bsp with each seed."""
    found = []
    for runs in plan.again(experiment):
        run = runs[0]
        if run.row.name != plan.AGAIN or any(outcomes[each.label].diverged for each in runs):
            continue
        if "cuda" in device(outcomes[run.label]):
            for held in _against(run, [runs[1]], run.setting.key, outcomes, tolerance):
                pair = replace(held.pair, second=f"{run.row.name} {AGAIN}", turn=0)
                found.append(Held(pair, run.label))
            continue
        first, second = (load_file(outcomes[each.label].parameters) for each in runs)
        apart, tensor = bits_difference(first, second)
        pair = Pair(
            setting=run.setting.key,
            seed=run.seed,
            first=run.row.name,
            second=f"{run.row.name} {AGAIN}",
            difference=_finite(apart),
            tensor=tensor,
            limit=0.0,
            wrong=bits_wrong(first, second),
            final=_finite(apart),
            passed=apart == 0,
        )
        found.append(Held(pair, run.label))
    return found


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def difference(first: Parameters, second: Parameters) -> tuple[float, str]:
    """Returns the largest max |a - b| / max |a| of any tensor, and the tensor's name."""
    if misfit := _misfit(first, second):
        return math.inf, misfit
    apart = {name: _relative(first[name], second[name]).max().item() for name in first}
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    return apart[worst], worst


def bits_difference(first: Parameters, second: Parameters) -> tuple[float, str]:
    """Returns zero if all bytes are equal; else the same as `difference`, but never zero."""
    if misfit := _misfit(first, second):
        return math.inf, misfit
    for name in first:
        if not torch.equal(_bytes(first[name]), _bytes(second[name])):
            return max(_relative(first[name], second[name]).max().item(), 5e-324), name
    return 0.0, "any tensor"


def wrong(first: Parameters, second: Parameters, limit: float) -> int:
    """Counts elements with |a - b| / max |a| above the limit or NaN; all elements if the models differ."""
    if _misfit(first, second):
        return _count(first)
    return sum(int((~(_relative(first[name], second[name]) <= limit)).sum()) for name in first)


def bits_wrong(first: Parameters, second: Parameters) -> int:
    """Counts elements with a different bit; all elements if the models do not match."""
    if _misfit(first, second):
        return _count(first)
    differing = ((_bytes(first[name]) != _bytes(second[name]), first[name].numel()) for name in first)
    return sum(int(bits.reshape(count, -1).any(1).sum()) for bits, count in differing if count)


def _count(parameters: Parameters) -> int:
    return sum(tensor.numel() for tensor in parameters.values())


def _misfit(first: Parameters, second: Parameters) -> str | None:
    """Returns what makes two models incomparable; None if nothing does."""
    if first.keys() != second.keys() or not first:
        return f"the names of its tensors ({', '.join(sorted(first.keys() ^ second.keys())) or 'none'})"
    for name in first:
        if first[name].shape != second[name].shape or first[name].dtype != second[name].dtype:
            return f"shape or dtype of {name}"
    return None


def _relative(first: Tensor, second: Tensor) -> Tensor:
    """Returns |a - b| / max |a| of every element; infinite for a difference from all zeros."""
    apart, scale = (first - second).double().abs(), first.double().abs().max()
    return torch.where(apart == 0, apart, apart / scale)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
