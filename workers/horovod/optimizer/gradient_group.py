"""Parcels: parameters whose gradients are exchanged together.

Decided alike on all ranks, from the optimizer's parameters alone, so that one
name means the same tensors everywhere whatever a rank's backward reaches, and
in which order. Without groups of the script's own, parameters are taken in
reverse order, in which backward reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

PARCEL_BYTES = 4 << 20
"""Where a parcel is full unless HOROVOD_FUSION_THRESHOLD says otherwise: small enough to leave early."""

Groups = int | Sequence[Sequence[torch.Tensor]] | None


@dataclass(slots=True)
class Parcel:
    """Some parameters, how far their gradients are, and what is under way for them.

    Attributes:
        name: What ranks are matched by.
        parameters: In one order on all ranks.
        missing: Parameters whose last backward pass of this step is still to come.
        handles: What to wait for; None until it is handed over.
    """

    name: str
    parameters: list[torch.Tensor]
    missing: set[torch.Tensor] = field(default_factory=set)
    handles: Any = None

    def reset(self) -> None:
        """Begins a step."""
        self.missing, self.handles = set(self.parameters), None


def pack(names: Mapping[torch.Tensor, str], groups: Groups, parcel_bytes: int) -> list[Parcel]:
    """Sorts parameters into parcels.

    Args:
        names: Every parameter that is trained, in the optimizer's order.
        groups: How many parcels, or which parameters go together: those named nowhere go alone.
        parcel_bytes: Where a parcel is full, in bytes, if there are no groups.
    """
    parameters = list(names)
    if groups is None:
        runs = _filled(parameters[::-1], parcel_bytes)
    elif isinstance(groups, int):
        runs = _cut(parameters[::-1], groups)
    else:
        chosen = [[one for one in group if one in names] for group in groups]
        grouped = {one for group in chosen for one in group}
        runs = [group for group in chosen if group]
        runs += [[one] for one in parameters[::-1] if one not in grouped]
    parcels = [Parcel(_name(names, run), run) for run in runs]
    for parcel in parcels:
        parcel.reset()
    return parcels


def check_groups(groups: Any) -> Groups:
    """What a script gave as groups.

    Raises:
        ValueError: It is neither a number from 1 nor lists of tensors, or a tensor is in two of them.
    """
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups > 0:
            return groups
    elif isinstance(groups, list):
        _check_lists(groups)
        return groups
    raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")


def _check_lists(groups: list[Any]) -> None:
    seen: set[torch.Tensor] = set()
    for one in (one for group in groups for one in group):
        if not isinstance(one, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if one in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(one)


def _filled(parameters: list[torch.Tensor], parcel_bytes: int) -> list[list[torch.Tensor]]:
    runs: list[list[torch.Tensor]] = []
    room = 0
    for parameter in parameters:
        if not runs or parameter.nbytes > room:
            runs.append([])
            room = parcel_bytes
        runs[-1].append(parameter)
        room -= parameter.nbytes
    return runs


def _cut(parameters: list[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Into `count` runs of as many parameters, the first ones with one more where that leaves a rest."""
    each, rest = divmod(len(parameters), count)
    starts = [index * each + min(index, rest) for index in range(count + 1)]
    runs = [parameters[start:end] for start, end in pairwise(starts)]
    return [run for run in runs if run]


def _name(names: Mapping[torch.Tensor, str], run: list[torch.Tensor]) -> str:
    first, last = names[run[0]], names[run[-1]]
    return first if len(run) == 1 else f"{first}..{last}"
