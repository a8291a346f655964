"""The parameter group of each bucket, as the script has them now.

A script may reorder, replace, empty, delete or add groups, and `load_state_dict` replaces all of them. So a
bucket's group is found by its parameters, never by the place of the group in the list.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket

Group = dict[str, Any]


class _Place(NamedTuple):
    groups: list[Group]
    """The groups of a bucket's parameters, each once."""
    without: frozenset[int]


class Groups:
    """Finds the groups of buckets' parameters.

    Args:
        optimizer: The optimizer whose groups count.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[tuple[int, ...]] = []
        self._group_of: dict[torch.nn.Parameter, Group] = {}
        self._frozen: list[torch.nn.Parameter] = []
        self._places: WeakKeyDictionary[Bucket, _Place] = WeakKeyDictionary()

    def look(self) -> bool:
        """Reads the optimizer's groups again; returns whether other parameters are in them."""
        groups = self._optimizer.param_groups
        seen = [(id(group), *map(id, group["params"])) for group in groups]
        if seen == self._seen:
            return False
        self._seen = seen
        self._group_of = {one: group for group in groups for one in group["params"]}
        self._places.clear()
        self._frozen = [one for one in self._group_of if not one.requires_grad]
        return True

    @property
    def thaws(self) -> bool:
        """Whether a parameter that was frozen at the last change of groups needs a gradient now."""
        return any(one.requires_grad for one in self._frozen)

    def of(self, bucket: Bucket) -> Group | None:
        """Returns the group of a bucket's parameters; None if none of them is in a group any more.

        Raises:
            ConfigError: They are in several groups with different options.
        """
        groups = self._place(bucket).groups
        if not groups:
            return None
        first, *others = groups
        for other in others:
            if _options(first) != _options(other):
                names = [tensor.name for tensor in bucket.spec.tensors]
                raise ConfigError(
                    f"the parameters {names[0]} to {names[-1]} were in one parameter group when"
                    " DistributedOptimizer was made, and are in groups with different options now, but the"
                    " hub steps them together: make the groups first, or make a new DistributedOptimizer; or"
                    " start the workers with --aggregate"
                )
        return first

    def without(self, bucket: Bucket) -> frozenset[int]:
        """Returns the positions of a bucket's parameters that are in no group any more."""
        return self._place(bucket).without

    def _place(self, bucket: Bucket) -> _Place:
        """Returns the groups of a bucket's parameters, as of the last look."""
        place = self._places.get(bucket)
        if place is None:
            found = [self._group_of.get(one) for one in bucket.parameters]
            groups = {id(group): group for group in found if group is not None}
            without = frozenset(position for position, group in enumerate(found) if group is None)
            place = self._places[bucket] = _Place(list(groups.values()), without)
        return place

    def unknown(self, known: set[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Returns the parameters in the groups that need a gradient and are not `known`."""
        self._frozen = [one for one in self._group_of if not one.requires_grad]
        return [one for one in self._group_of if one not in known and one.requires_grad and one.numel()]


def _options(group: Group) -> Group:
    return {name: value for name, value in group.items() if name != "params"}
