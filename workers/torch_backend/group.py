"""The two classes that torch.distributed accepts as a backend, and which of them this torch takes.

Before torch 2.14 a backend in Python is a whole `ProcessGroup`: it takes the tensors of all devices. From
2.14 on it is a `Backend`, so that a group can have another one for CUDA: "cpu:hubring,cuda:nccl".
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from hubring.workers.torch_backend.operations import GroupOperations
from hubring.workers.torch_backend.works import see_through_holders


class HubringProcessGroup(GroupOperations, distributed.ProcessGroup):
    """A whole group, for torch 2.13."""

    _name = _description = ""

    # torch has older names for these, and calls either.
    _allgather_base = GroupOperations.all_gather_single
    allgather_into_tensor_coalesced = GroupOperations.all_gather_single_coalesced
    _reduce_scatter_base = GroupOperations.reduce_scatter_single
    reduce_scatter_tensor_coalesced = GroupOperations.reduce_scatter_single_coalesced
    alltoall_base = GroupOperations.all_to_all_single

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def _start_coalescing(self, device: Any) -> None:
        """Nothing is collected: torch then calls the coalesced form of the operation."""

    def _end_coalescing(self, device: Any) -> None:
        return None


if TYPE_CHECKING or hasattr(c10d.Backend, "supports_reconfigure"):

    class HubringBackend(GroupOperations, c10d.Backend):
        """A group's backend for some devices, from torch 2.14 on."""

        supports_splitting = True
        # torch looks each of these up in the class again, without end if the class does not have it.
        supports_coalescing = supports_time_estimate = supports_shrinking = False
        supports_reconfigure = supports_window = False

        @property
        def options(self) -> c10d.Backend.Options:
            """What torch asks a group for: the timeout."""
            return c10d.Backend.Options("hubring", timedelta(seconds=self._timeout))

        def split(self, store: Store, ranks: Sequence[int], options: Any) -> HubringBackend | None:
            """Returns a member of a group of some of this group's ranks; None on the others."""
            if self._own not in ranks:
                return None
            part = HubringBackend(ranks.index(self._own), len(ranks))
            members = [self._world_ranks[rank] for rank in ranks]
            part.open(options.group_name, store, members, part.rank(), options._timeout)
            return part

        def start_coalescing(self) -> None:
            """Nothing is collected: torch then calls the coalesced form of the operation."""

        def end_coalescing(self) -> None:
            return None

    see_through_holders()
    _KIND: type[HubringProcessGroup | HubringBackend] = HubringBackend
else:
    _KIND = HubringProcessGroup


def make_group(options: Any) -> HubringProcessGroup | HubringBackend:
    """Returns a member of a new group, for `register_backend`.

    Args:
        options: torch's `_DistributedBackendOptions`.
    """
    own, size = options.group_rank, options.group_size
    group = _KIND(own, size)
    ranks = options.global_ranks_in_group or range(size)
    group.open(options.group_id or "world", options.store, ranks, own, options.timeout)
    return group
