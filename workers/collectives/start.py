"""How a collective begins, and what is made of what comes."""

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
    """Begins a collective of these tensors; `then` as of `Communicator.collective`.

    Raises:
        UsageError: This rank is none of the group, or the root is no rank of it.
    """
    communicator = communicator or context.current().communicator
    _check_group(group, communicator)
    if collective in ROOTED:
        _check_root(root, group, communicator)
    ranks = group.members if group is not None else ()
    call = Call(collective, name or collective.name.lower(), op, root, ranks, splits)
    if root != communicator.rank and collective in (Collective.BROADCAST, Collective.SCATTER):
        # Only the root's travel; that the others expect the same in a broadcast is compared.
        check_tensors(call.name, tensors)
        if collective is Collective.BROADCAST:
            call = replace(call, layouts=tuple(map(layout_of, tensors)))
        tensors = []
    return communicator.collective(call, *tensors, then=then)


def _check_group(group: Group | None, communicator: Communicator) -> None:
    if group is None:
        return
    if group.removed:
        raise UsageError(f"{group} was removed: make a new one")
    if not group.included():
        raise UsageError(f"rank {communicator.rank} is none of {group}: let its members call alone")


def _check_root(root: int, group: Group | None, communicator: Communicator) -> None:
    if not 0 <= root < communicator.size:
        raise UsageError(f"root is {root}; ranks are 0 to {communicator.size - 1}")
    if group is not None and root not in group.ranks:
        raise UsageError(f"root is {root}, which is none of {group}; roots are ranks of the whole job")


def into(*tensors: Tensor, many: bool = False) -> Callable[[Sequence[Tensor]], Any]:
    """Overwrites what was given, and hands it out."""

    def then(came: Sequence[Tensor]) -> Any:
        for tensor, one in zip(tensors, came, strict=True):
            tensor.detach().copy_(one)
        return list(tensors) if many else tensors[0]

    return then


def like(tensors: Sequence[Tensor], *, many: bool = True) -> Callable[[Sequence[Tensor]], Any]:
    """Brings each to the device of the one that was given."""
    devices = [tensor.device for tensor in tensors]

    def then(came: Sequence[Tensor]) -> Any:
        results = [one.to(device) for one, device in zip(came, devices, strict=True)]
        return results if many else results[0]

    return then


def tensor_of(work: CollectiveWork) -> Tensor:
    """Waits for a work whose result is a tensor."""
    result: Tensor = work.get()
    return result


def tensors_of(work: CollectiveWork) -> list[Tensor]:
    """Waits for a work whose result is many."""
    results: list[Tensor] = work.get()
    return results
