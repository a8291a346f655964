"""The gate: which rows ended in the same parameters, so that their speeds may be compared.

All synchronous rows compute the same thing: every step, the mean gradient of
the same batch, applied once. Only the order of the additions differs, so their
parameters may differ by rounding and by nothing else. The hub reduces in rank
order, so a second run of it must not differ at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from workers.compare import plan
from workers.compare.experiment import Experiment
from workers.compare.outcome import Outcome
from workers.compare.plan import Run

Parameters = Mapping[str, Tensor]
"""A model's parameters by name, on the CPU."""

TOLERANCE = 1e-4
"""How far two synchronous rows may be apart: max |a - b| / max |a|, per tensor.

One sum in float32 rounds by 6e-8; the batch is summed in another order in every
step, and training amplifies what differs: the jobs that ship were measured at
5e-7 to 1.3e-5. One gradient of digits lost, counted twice or halved was measured
to leave 5e-2 if it was the first of 440, and 1e-3 if the last. The limit lies between.

Some seeds amplify more: digits with seed 3, in one process that adds the two halves of every batch, is by
rounding alone 1e-4 apart from itself after 220 steps and 2e-3 after 330, where seeds 0 to 2 stay under 2e-5
for 660. So a row that fails after long training is to be judged again over less of it.
"""

AGAIN = "again"
"""Marks the second run of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs, held against each other.

    Attributes:
        setting: Key of the setting in which they ran.
        seed: Their seed.
        first: Row that is measured against.
        second: Row that is judged.
        difference: Largest relative difference of any tensor; NaN and infinity are possible.
        tensor: Where that is, or what does not fit at all.
        limit: What was allowed; 0: every bit must be the same.
        run: Label of the run that is judged.
    """

    setting: str
    seed: int
    first: str
    second: str
    difference: float
    tensor: str
    limit: float
    run: str

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # false for NaN

    def __str__(self) -> str:
        allowed = f"at most {self.limit:g}" if self.limit else "no difference at all"
        found = f"{self.difference:.2g} in {self.tensor} (seed {self.seed})"
        return f"{self.second} differs from {self.first} by {found}; {allowed} is allowed"

    def as_json(self) -> dict[str, Any]:
        """The pair as a JSON object; JSON knows no infinity, so that stands as text."""
        finite = math.isfinite(self.difference)
        words = {name: value for name, value in asdict(self).items() if name != "run"}
        return words | {
            "difference": self.difference if finite else str(self.difference),
            "passed": self.passed,
        }


@dataclass(frozen=True, slots=True)
class Gate:
    """What the pairs came to."""

    pairs: tuple[Pair, ...]
    tolerance: float

    @property
    def passed(self) -> bool:
        return all(pair.passed for pair in self.pairs)

    def closed_to(self, runs: Collection[str]) -> str | None:
        """Why the speed of these runs, by label, may not be shown; None where it may."""
        failed = [str(pair) for pair in self.pairs if pair.run in runs and not pair.passed]
        return "; ".join(failed) or None

    def as_json(self) -> dict[str, Any]:
        """The gate as a JSON object."""
        pairs = [pair.as_json() for pair in self.pairs]
        return {"passed": self.passed, "tolerance": self.tolerance, "pairs": pairs}


def judge(experiment: Experiment, outcomes: Mapping[str, Outcome]) -> Gate:
    """Holds the synchronous rows of every setting and seed against the first, and the hub against itself.

    A row that lost a worker took fewer gradients than the others, so settings with a fault have no pairs.

    Args:
        experiment: What was run.
        outcomes: By label.
    """
    tolerance = experiment.tolerance or TOLERANCE
    found: dict[tuple[str, str], Pair] = {}
    for setting in experiment.settings:
        for seed in experiment.seeds if setting.fault is None else ():
            runs = [Run(row.meets(setting), row, seed) for row in experiment.ways if row.synchronous]
            fresh = [run for run in runs[1:] if (runs[0].label, run.label) not in found]
            for run, pair in _against(runs[0], fresh, setting.key, outcomes, tolerance):
                found[runs[0].label, run.label] = pair
    return Gate((*found.values(), *_again(experiment, outcomes)), tolerance)


def _against(
    reference: Run, runs: list[Run], setting: str, outcomes: Mapping[str, Outcome], tolerance: float
) -> Iterator[tuple[Run, Pair]]:
    if not runs:
        return
    expected = load_file(outcomes[reference.label].parameters)
    for run in runs:
        apart, tensor = difference(expected, load_file(outcomes[run.label].parameters))
        yield (
            run,
            Pair(
                setting=setting,
                seed=run.seed,
                first=reference.row.name,
                second=run.row.name,
                difference=apart,
                tensor=tensor,
                limit=tolerance,
                run=run.label,
            ),
        )


def _again(experiment: Experiment, outcomes: Mapping[str, Outcome]) -> list[Pair]:
    runs = plan.again(experiment)
    if runs is None:
        return []
    first, second = (load_file(outcomes[run.label].parameters) for run in runs)
    apart, tensor = bits_difference(first, second)
    name, label = runs[0].row.name, runs[0].label
    return [
        Pair(
            setting=runs[0].setting.key,
            seed=runs[0].seed,
            first=name,
            second=f"{name} {AGAIN}",
            difference=apart,
            tensor=tensor,
            limit=0.0,
            run=label,
        )
    ]


def difference(first: Parameters, second: Parameters) -> tuple[float, str]:
    """Largest max |a - b| / max |a| over the tensors, and the tensor's name."""
    if misfit := _misfit(first, second):
        return math.inf, misfit
    apart = {name: _relative(first[name], second[name]) for name in first}
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    return apart[worst], worst


def bits_difference(first: Parameters, second: Parameters) -> tuple[float, str]:
    """Zero if all bytes are the same; else as `difference`, but never zero."""
    if misfit := _misfit(first, second):
        return math.inf, misfit
    for name in first:
        if not torch.equal(_bytes(first[name]), _bytes(second[name])):
            return max(_relative(first[name], second[name]), 5e-324), name
    return 0.0, "any tensor"


def _misfit(first: Parameters, second: Parameters) -> str | None:
    """In words, what makes two models incomparable."""
    if first.keys() != second.keys() or not first:
        return f"the names of its tensors ({', '.join(sorted(first.keys() ^ second.keys())) or 'none'})"
    for name in first:
        if first[name].shape != second[name].shape or first[name].dtype != second[name].dtype:
            return f"shape or dtype of {name}"
    return None


def _relative(first: Tensor, second: Tensor) -> float:
    apart, scale = (tensor.abs().max().item() for tensor in ((first - second).double(), first.double()))
    if math.isnan(apart) or math.isnan(scale):
        return math.nan
    if scale == 0:
        return 0.0 if apart == 0 else math.inf
    return float(apart / scale)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
