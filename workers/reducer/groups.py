"""The parameter groups of an optimizer, as the script has them now.

A script may reorder, replace, empty, delete or add groups, and `load_state_dict` replaces all of them. So the
groups of a bucket are found by its parameters, never by their places in the list.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from hubring.ps.core.types import HyperTable, StepHyper
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.value_memory import nothing

Group = dict[str, Any]

_needs_gradient = attrgetter("requires_grad")
_made = count()


class _Place(NamedTuple):
    """Where the parameters of one bucket are.

    Attributes:
        groups: Their groups, each once.
        group_of: The index in `groups` of each parameter's; of one in no group, that of a neighbor.
        left_out: The positions of those in no group.
    """

    groups: list[Group]
    group_of: list[int]
    left_out: frozenset[int]


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Returns all parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class ParameterGroups:
    """Finds the groups of buckets' parameters, and their hyperparameters.

    Attributes:
        optimizer: The optimizer whose groups count.
        number: Orders the groups of a process by when they were made, equally on all ranks.
        changed: Whether other parameters are in the groups than at the last `note_known`.
        state_changed: Whether the script has changed the optimizer's state, where the hub has it.
        give_state: Makes such a change the hub's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.number = next(_made)
        self.changed = False
        self.state_changed: Callable[[], bool] = nothing
        self.give_state: Callable[[], object] = nothing
        self._seen: list[int] = []
        self._group_of: dict[torch.nn.Parameter, Group] = {}
        self._frozen: list[torch.nn.Parameter] = []
        self._places: dict[Bucket, _Place] = {}
        self._read: dict[Bucket, tuple[list[Any], StepHyper]] = {}
        """The options that were read last, and what they are as numbers."""

    def look(self) -> None:
        """Reads the optimizer's groups again."""
        groups = self.optimizer.param_groups
        lists = [group["params"] for group in groups]
        seen = [*map(id, groups), *map(len, lists), *map(id, chain.from_iterable(lists))]
        if seen == self._seen:
            return
        self._seen, self.changed = seen, True
        self._group_of = {one: group for group in self.optimizer.param_groups for one in group["params"]}
        self._places.clear()
        self._frozen = [one for one in self._group_of if not one.requires_grad]

    @property
    def grows(self) -> bool:
        """Whether there may be `unknown` parameters: the groups have changed, or a frozen one has thawed."""
        return self.changed or any(map(_needs_gradient, self._frozen))

    def hyper(self, bucket: Bucket) -> StepHyper:
        """Returns the hyperparameters with which the hub steps a bucket.

        Raises:
            ConfigError: The hub does not support an option.
        """
        place = self._places.get(bucket) or self._place(bucket)
        # No call of Python for each option, since each parameter may have a group of its own.
        options = list(chain.from_iterable(map(dict.values, place.groups)))
        read, hyper = self._read.get(bucket, ((), {}))
        if len(options) != len(read) or not all(map(is_, options, read)):
            hypers = [hyper_of(group, bucket.spec.optimizer) for group in place.groups]
            hyper = HyperTable.of(map(hypers.__getitem__, place.group_of))
            if all(map(_is_fixed, place.groups)):
                self._read[bucket] = options, hyper
        return hyper

    def left_out(self, bucket: Bucket) -> frozenset[int]:
        """Returns the positions of a bucket's parameters that are in no group, so that the hub steps none."""
        return (self._places.get(bucket) or self._place(bucket)).left_out

    def _place(self, bucket: Bucket) -> _Place:
        """Finds the groups of a bucket's parameters, once after a change of groups."""
        found = [self._group_of.get(one) for one in bucket.parameters]
        groups = {id(group): group for group in found if group is not None}
        index, group_of = dict(zip(groups, count(), strict=False)), list[int]()
        for group in found:
            group_of.append(index[id(group)] if group is not None else (group_of or [0])[-1])
        left_out = frozenset(position for position, group in enumerate(found) if group is None)
        held = list(groups.values()) or [self.optimizer.defaults]
        place = self._places[bucket] = _Place(held, group_of, left_out)
        return place

    def unknown(self, known: set[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Returns the parameters in the groups that need a gradient and are not `known`."""
        return [one for one in self._group_of if one not in known and one.requires_grad and one.numel()]

    def note_known(self) -> None:
        """Records that no parameter in the groups is `unknown` now."""
        self.changed = False
        self._frozen = [one for one in self._group_of if not one.requires_grad]


def _is_fixed(group: Group) -> bool:
    """Whether no option can change in place, as a tensor or a list can."""
    return all(map(_is_constant, (value for name, value in group.items() if name != "params")))


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, bool | int | float | str)
