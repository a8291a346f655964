"""Starts a collective and converts its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.store.collective import ROOTED, layout_of
from hubring.workers.collectives.group import Group
from hubring.workers.communicators.base import CollectiveWork, Communicator, check_tensors
from hubring.workers.runtime import context


def begin(
    collective: Collective,
    tensors: Sequence[Tensor],
    name: str | None,
    group: Group | None,
    communicator: Communicator | None,
    *,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
    splits: tuple[int, ...] = (),
    then: Callable[[Sequence[Tensor]], Any] | None = None,
) -> CollectiveWork:
    """Starts a collective of these tensors. See `Communicator.collective` for `then`.

    Raises:
        UsageError: This rank or the root is not in the group, or the group was removed.
    """
    communicator = communicator or context.current().communicator
    _check_group(group, communicator)
    if collective in ROOTED:
        _check_root(root, group, communicator)
    ranks = group.members if group is not None else ()
    call = Call(collective, name or collective.name.lower(), op, root, ranks, splits)
    if root != communicator.rank and collective in (Collective.BROADCAST, Collective.SCATTER):
        # Only the root sends tensors. In a broadcast the other ranks' layouts are compared with its.
        check_tensors(call.name, tensors)
        if collective is Collective.BROADCAST:
            call = replace(call, layouts=tuple(map(layout_of, tensors)))
        tensors = []
    return communicator.collective(call, *tensors, then=then)


def _check_group(group: Group | None, communicator: Communicator) -> None:
    if group is None:
        return
    if group.removed:
        raise UsageError(f"{group} was removed: make a new group")
    if not group.included():
        raise UsageError(f"rank {communicator.rank} is not in {group}: call this only on its members")


def _check_root(root: int, group: Group | None, communicator: Communicator) -> None:
    if not 0 <= root < communicator.size:
        raise UsageError(f"root is {root}; it must be 0 to {communicator.size - 1}")
    if group is not None and root not in group.ranks:
        raise UsageError(f"root is {root}, which is not in {group}; pass the root's rank in the whole job")


def into(*tensors: Tensor, many: bool = False) -> Callable[[Sequence[Tensor]], Any]:
    """Returns a function that writes the results to `tensors` and returns these."""

    def then(came: Sequence[Tensor]) -> Any:
        for tensor, one in zip(tensors, came, strict=True):
            tensor.detach().copy_(one)
        return list(tensors) if many else tensors[0]

    return then


def like(tensors: Sequence[Tensor], *, many: bool = True) -> Callable[[Sequence[Tensor]], Any]:
    """Returns a function that moves each result to the device of its input."""
    devices = [tensor.device for tensor in tensors]

    def then(came: Sequence[Tensor]) -> Any:
        results = [one.to(device) for one, device in zip(came, devices, strict=True)]
        return results if many else results[0]

    return then


def tensor_of(work: CollectiveWork) -> Tensor:
    """Waits for a work and returns its result, a tensor."""
    result: Tensor = work.get()
    return result


def tensors_of(work: CollectiveWork) -> list[Tensor]:
    """Waits for a work and returns its result, a list of tensors."""
    results: list[Tensor] = work.get()
    return results
