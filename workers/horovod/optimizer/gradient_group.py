"""Buckets: parameters whose gradients are exchanged together.

The buckets depend only on the optimizer's parameters. So a bucket has the same tensors on all ranks,
whichever parameters backward reaches, in whichever order. Unless the script sets groups, parameters are
assigned in reverse order, in which backward usually reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

BUCKET_BYTES = 4 << 20
"""Size of a bucket if HOROVOD_FUSION_THRESHOLD is not set. Small buckets are sent early."""

Groups = int | Sequence[Sequence[torch.Tensor]] | None


@dataclass(slots=True)
class Bucket:
    """The parameters of one exchange, and the progress of their gradients.

    Attributes:
        name: Matches the exchange across ranks.
        parameters: In the same order on all ranks.
        missing: Parameters that still wait for their last backward pass of this step.
        handles: The operations of the exchange; None until it starts.
    """

    name: str
    parameters: list[torch.Tensor]
    missing: set[torch.Tensor] = field(default_factory=set)
    handles: Any = None

    def reset(self) -> None:
        """Starts a step."""
        self.missing, self.handles = set(self.parameters), None


def pack(names: Mapping[torch.Tensor, str], groups: Groups, bucket_bytes: int) -> list[Bucket]:
    """Assigns parameters to buckets.

    Args:
        names: Every trained parameter, in the optimizer's order.
        groups: Number of buckets, or lists of parameters; a parameter in no list gets its own bucket.
        bucket_bytes: Maximum size of a bucket in bytes without groups; a larger parameter gets its own
            bucket.
    """
    parameters = list(names)
    if groups is None:
        runs = _filled(parameters[::-1], bucket_bytes)
    elif isinstance(groups, int):
        runs = _cut(parameters[::-1], groups)
    else:
        chosen = [[one for one in group if one in names] for group in groups]
        grouped = {one for group in chosen for one in group}
        runs = [group for group in chosen if group]
        runs += [[one] for one in parameters[::-1] if one not in grouped]
    buckets = [Bucket(_name(names, run), run) for run in runs]
    for bucket in buckets:
        bucket.reset()
    return buckets


def check_groups(groups: Any) -> Groups:
    """Returns the argument `groups`.

    Raises:
        ValueError: It is neither a number of at least 1 nor lists of tensors, or a tensor is in two lists.
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


def _filled(parameters: list[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    runs: list[list[torch.Tensor]] = []
    room = 0
    for parameter in parameters:
        if not runs or parameter.nbytes > room:
            runs.append([])
            room = bucket_bytes
        runs[-1].append(parameter)
        room -= parameter.nbytes
    return runs


def _cut(parameters: list[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Splits the parameters into `count` runs whose lengths differ by at most 1."""
    each, rest = divmod(len(parameters), count)
    starts = [index * each + min(index, rest) for index in range(count + 1)]
    runs = [parameters[start:end] for start, end in pairwise(starts)]
    return [run for run in runs if run]


def _name(names: Mapping[torch.Tensor, str], run: list[torch.Tensor]) -> str:
    first, last = names[run[0]], names[run[-1]]
    return first if len(run) == 1 else f"{first}..{last}"
