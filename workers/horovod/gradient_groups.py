"""The groups of an optimizer's parameters whose gradients are exchanged together.

The groups depend only on the optimizer's parameters. So a group has the same tensors on all ranks,
whichever parameters backward reaches, in whichever order. Unless the script sets groups, parameters are
assigned in reverse order, in which backward usually reaches them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from hubring.ps.config.environment import environment
from hubring.ps.job.sharding import runs_within
from hubring.workers.horovod.basics import split_list
from hubring.workers.horovod.world import ProcessSet, current

BUCKET_BYTES = 4 << 20
"""Size of a bucket if HOROVOD_FUSION_THRESHOLD is not set. Small buckets are sent early."""

Groups = int | Sequence[Sequence[torch.Tensor]] | None
NamedParameters = Iterable[tuple[str, torch.Tensor]] | None


@dataclass(slots=True)
class GradientGroup:
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


def names_of(optimizer: Optimizer, named_parameters: NamedParameters) -> dict[torch.Tensor, str]:
    """Returns the name of every parameter, from pairs of names and parameters, or numbered.

    Raises:
        ValueError: A parameter has no name, or two have the same.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        pairs = [
            (f"allreduce.noname.{index}.{place}", parameter)
            for index, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        ]
    else:
        pairs = _checked(list(named_parameters))
    names = {parameter: name for name, parameter in pairs}
    unnamed = [parameter for parameter in held if parameter not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {len(unnamed)} of the optimizer's parameters were not"
            f" named, the first of shape {tuple(unnamed[0].shape)}; pass all of model.named_parameters()"
        )
    return names


def buckets_of(
    names: Mapping[torch.Tensor, str], groups: Groups, process_set: ProcessSet
) -> list[GradientGroup]:
    """Returns the buckets of the trained parameters; none if this rank never exchanges with others.

    Raises:
        ValueError: `groups` is neither a number of at least 1 nor lists of tensors, or a tensor is in two
            lists.
    """
    _check_groups(groups)
    if current().communicator.size == 1 or not process_set.included():
        return []
    threshold = environment().get("HOROVOD_FUSION_THRESHOLD", "")
    return pack(names, groups, int(threshold) if threshold.isdecimal() else BUCKET_BYTES)


def _checked(pairs: list[Any]) -> list[tuple[str, torch.Tensor]]:
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by"
            " model.named_parameters()."
        )
    twice = ", ".join(sorted(duplicates(name for name, _ in pairs)))
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {twice}")
    return pairs


def duplicates(values: Iterable[Any]) -> set[Any]:
    """Returns the values that occur more than once."""
    return {one for one, count in Counter(values).items() if count > 1}


def pack(names: Mapping[torch.Tensor, str], groups: Groups, bucket_bytes: int) -> list[GradientGroup]:
    """Assigns parameters to buckets.

    Args:
        names: Every trained parameter, in the optimizer's order.
        groups: Number of buckets, or lists of parameters; a parameter in no list gets its own bucket.
        bucket_bytes: Maximum size of a bucket in bytes without groups; a larger parameter gets its own
            bucket.
    """
    parameters = list(names)
    if groups is None:
        runs = runs_within(parameters[::-1], bucket_bytes, lambda one: one.nbytes)
    elif isinstance(groups, int):
        runs = [run for run in split_list(parameters[::-1], groups) if run]
    else:
        chosen = [[one for one in group if one in names] for group in groups]
        grouped = {one for group in chosen for one in group}
        runs = [group for group in chosen if group]
        runs += [[one] for one in parameters[::-1] if one not in grouped]
    return [GradientGroup(_group_name(names, run), run) for run in runs]


def _check_groups(groups: Any) -> None:
    """Raises ValueError for what is neither None, a number of at least 1, nor lists of different tensors."""
    if groups is None or (type(groups) is int and groups > 0):
        return
    if not isinstance(groups, list):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    tensors = [one for group in groups for one in group]
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        raise ValueError("groups must consist of torch.Tensor.")
    if duplicates(tensors):
        raise ValueError("A parameter can only appear once in groups.")


def _group_name(names: Mapping[torch.Tensor, str], run: list[torch.Tensor]) -> str:
    first, last = names[run[0]], names[run[-1]]
    return first if len(run) == 1 else f"{first}..{last}"
