"""The gate: which rows ended in the same parameters, so that their speeds may be compared.

All synchronous rows compute the same thing: every step, the mean gradient of
the same batch, applied once. Only the order of the additions differs, so their
parameters may differ by rounding and by nothing else. The hub reduces in rank
order, so a second run of it must not differ at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]
"""A model's parameters by name, on the CPU."""

TOLERANCE = 1e-4
"""How far two synchronous rows may be apart: max |a - b| / max |a|, per tensor.

One sum in float32 rounds by 6e-8; the batch is summed in another order in every
step, and training amplifies what differs: the jobs that ship were measured at
5e-7 to 1.3e-5. One gradient of digits lost, counted twice or halved was measured
to leave 5e-2 if it was the first of 440, and 1e-3 if the last. The limit lies between.
"""

AGAIN = "again"
"""Marks the second run of a row."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs, held against each other.

    Attributes:
        first: Row that is measured against.
        second: Row that is judged.
        difference: Largest relative difference of any tensor; NaN and infinity are possible.
        tensor: Where that is, or what does not fit at all.
        limit: What was allowed; 0: every bit must be the same.
    """

    first: str
    second: str
    difference: float
    tensor: str
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # false for NaN

    def __str__(self) -> str:
        allowed = f"at most {self.limit:g}" if self.limit else "no difference at all"
        found = f"{self.difference:.2g} in {self.tensor}"
        return f"{self.second} differs from {self.first} by {found}; {allowed} is allowed"


@dataclass(frozen=True, slots=True)
class Gate:
    """What the pairs came to."""

    pairs: tuple[Pair, ...]

    @property
    def passed(self) -> bool:
        return all(pair.passed for pair in self.pairs)

    def closed_to(self, row: str) -> str | None:
        """Why this row's speed may not be shown; None where it may."""
        failed = [str(pair) for pair in self.pairs if row == pair.second.split()[0] and not pair.passed]
        return "; ".join(failed) or None


def judge(finals: Mapping[str, Parameters], again: Mapping[str, Parameters], tolerance: float) -> Gate:
    """Holds the synchronous rows against the first of them, and each second run against its first.

    Args:
        finals: Final parameters by name of the synchronous row, the one to measure against first.
        again: Final parameters of second runs, by name of the row.
        tolerance: Largest relative difference between rows.
    """
    pairs = []
    for reference in list(finals)[:1]:
        for row in list(finals)[1:]:
            pairs.append(Pair(reference, row, *difference(finals[reference], finals[row]), tolerance))
    for row, parameters in again.items():
        pairs.append(Pair(row, f"{row} {AGAIN}", *bits_difference(finals[row], parameters), 0.0))
    return Gate(tuple(pairs))


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
