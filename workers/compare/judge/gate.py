"""The gate: which rows ended in the same parameters, so that their speeds may be compared.

All synchronous rows compute the same thing: every step, the mean gradient of
the same batch, applied once. Only the order of the additions differs, so their
parameters may differ by rounding and by nothing else. Training amplifies what
differs, some seeds by 10,000 times in a few hundred steps, so rows are held
against each other after their first steps (`hubring.workers.compare.run.outcome.EARLY`),
and what that has become by the end is only told. The hub reduces in rank order,
so a second run of it must not differ at all, to the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from hubring.workers.compare.experiment import plan
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.result.findings import Gate, Pair
from hubring.workers.compare.run.outcome import EARLY, Outcome

Parameters = Mapping[str, Tensor]
"""A model's parameters by name, on the CPU."""

TOLERANCE = 1e-4
"""How far two synchronous rows may be apart: max |a - b| / max |a|, per tensor.

One sum in float32 rounds by 6e-8; the batch is summed in another order in every step. In one process that
adds the two halves of every batch, digits with seeds 0 to 3 was measured to be 2e-7 to 3e-7 apart from itself
after 22 steps, and 5e-7 to 2e-3 after 660. One gradient lost, counted twice or halved leaves 5e-2 by the end
of 440 steps if it was the first. The limit lies between. A fault of the hub that comes later than these
steps shows in its second run, unless it comes twice in the same way.

The wider a layer, the more of its ReLUs lie so near to zero that rounding tips one over, and that sample's
gradient through it with it: with 16,000 hidden units 548 of 8 million elements were up to 2.4e-4 apart after
20 steps, all of them in the rows and columns of a few units. A lost gradient moves nearly all elements.
`experiment.tolerance` is for such models.
"""

AGAIN = "again"
"""Marks the second run of a row."""


class Held(NamedTuple):
    """A pair, and whose runs these are.

    Attributes:
        pair: What was found.
        run: Label of the run that is judged.
        reference: Label of the run that is measured against, if that may be the one at fault; None: it is
            one process alone, or the same row.
    """

    pair: Pair
    run: str
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The gate, and what it means for the runs."""

    held: Sequence[Held]
    tolerance: float

    @property
    def gate(self) -> Gate:
        """What the pairs came to."""
        pairs = [each.pair for each in self.held]
        return Gate(all(pair.passed for pair in pairs), self.tolerance, pairs)

    def closed_to(self, runs: Collection[str]) -> str | None:
        """Why the speed of these runs, by label, may not be shown; None where it may.

        Of two that differ either may be wrong: what is measured against is shown only where another row
        agrees with it.
        """
        upheld = {each.reference for each in self.held if each.pair.passed}
        failed = [
            str(each.pair)
            for each in self.held
            if not each.pair.passed and (each.run in runs or each.reference in set(runs) - upheld)
        ]
        return "; ".join(failed) or None

    def wrong(self, runs: Collection[str]) -> int | None:
        """Elements of these runs, by label, that differ by more than is allowed; None: nobody compared."""
        found = [each.pair.wrong for each in self.held if each.run in runs]
        return sum(found) if found else None


def judge(experiment: Experiment, outcomes: Mapping[str, Outcome]) -> Judgement:
    """Holds synchronous rows, by setting, seed and turn, against the first, and the hub against itself.

    A row that lost a worker took fewer gradients than the others, so settings with a fault have no pairs;
    nor has a run that diverged, which left no parameters.

    Args:
        experiment: What was run.
        outcomes: By label.
    """
    tolerance = experiment.tolerance or TOLERANCE
    found: dict[tuple[str, str], Held] = {}
    for setting in experiment.settings:
        turns = product(experiment.seeds, range(experiment.repeats)) if setting.fault is None else ()
        for seed, turn in turns:
            asked = [Run(row.meets(setting), row, seed, turn) for row in experiment.ways if row.synchronous]
            runs = [run for run in asked if not outcomes[run.label].diverged]
            fresh = [run for run in runs[1:] if (runs[0].label, run.label) not in found]
            for held in _against(runs[0], fresh, setting.key, outcomes, tolerance) if fresh else ():
                found[runs[0].label, held.run] = held
    return Judgement((*found.values(), *_again(experiment, outcomes)), tolerance)


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
            passed=apart <= tolerance,  # false for NaN
        )
        yield Held(pair, run.label, None if reference.row.name == "local" else reference.label)


def _again(experiment: Experiment, outcomes: Mapping[str, Outcome]) -> list[Held]:
    runs = plan.again(experiment)
    if runs is None or any(outcomes[run.label].diverged for run in runs):
        return []
    first, second = (load_file(outcomes[run.label].parameters) for run in runs)
    apart, tensor = bits_difference(first, second)
    run = runs[0]
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
    return [Held(pair, run.label)]


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def difference(first: Parameters, second: Parameters) -> tuple[float, str]:
    """Largest max |a - b| / max |a| over the tensors, and the tensor's name."""
    if misfit := _misfit(first, second):
        return math.inf, misfit
    apart = {name: _relative(first[name], second[name]).max().item() for name in first}
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    return apart[worst], worst


def bits_difference(first: Parameters, second: Parameters) -> tuple[float, str]:
    """Zero if all bytes are the same; else as `difference`, but never zero."""
    if misfit := _misfit(first, second):
        return math.inf, misfit
    for name in first:
        if not torch.equal(_bytes(first[name]), _bytes(second[name])):
            return max(_relative(first[name], second[name]).max().item(), 5e-324), name
    return 0.0, "any tensor"


def wrong(first: Parameters, second: Parameters, limit: float) -> int:
    """Elements of which |a - b| / max |a| is over the limit, or no number; all where models do not fit."""
    if _misfit(first, second):
        return _count(first)
    return sum(int((~(_relative(first[name], second[name]) <= limit)).sum()) for name in first)


def bits_wrong(first: Parameters, second: Parameters) -> int:
    """Elements of which some bit differs; all where the models do not fit."""
    if _misfit(first, second):
        return _count(first)
    differing = ((_bytes(first[name]) != _bytes(second[name]), first[name].numel()) for name in first)
    return sum(int(bits.reshape(count, -1).any(1).sum()) for bits, count in differing if count)


def _count(parameters: Parameters) -> int:
    return sum(tensor.numel() for tensor in parameters.values())


def _misfit(first: Parameters, second: Parameters) -> str | None:
    """In words, what makes two models incomparable."""
    if first.keys() != second.keys() or not first:
        return f"the names of its tensors ({', '.join(sorted(first.keys() ^ second.keys())) or 'none'})"
    for name in first:
        if first[name].shape != second[name].shape or first[name].dtype != second[name].dtype:
            return f"shape or dtype of {name}"
    return None


def _relative(first: Tensor, second: Tensor) -> Tensor:
    """|a - b| / max |a| of every element; against nothing but zeros, a difference is infinite."""
    apart, scale = (first - second).double().abs(), first.double().abs().max()
    return torch.where(apart == 0, apart, apart / scale)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
