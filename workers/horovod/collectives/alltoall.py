"""Alltoall by Horovod's names: each rank's rows are dealt out to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from hubring.workers import collectives
from hubring.workers.horovod.collectives.allreduce import gradient_name
from hubring.workers.horovod.collectives.sendable import sendable
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.world.process_set import ProcessSet, checked, global_process_set
from hubring.workers.horovod.world.world import current

Tensor = torch.Tensor
Splits = Tensor | Sequence[int] | None


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to deal out rows; arguments and errors as of `alltoall`.

    Returns:
        A handle; `synchronize` gives (output, received_splits), also where no splits were given.
    """
    world, members = current(), checked(process_set)
    counts = _counts(tensor, splits, len(members.ranks))
    given = sendable(tensor)[: sum(counts)]

    def start(full: str) -> Any:
        here = world.communicator
        return [collectives.alltoall_async(given, counts, full, group=members.group, communicator=here)]

    def finish(result: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
        output, received = result
        return output, torch.as_tensor(received, dtype=torch.int32)

    return world.begin("alltoall", name, members, start, finish)


@overload
def alltoall(
    tensor: Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = ...
) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> tuple[Tensor, Tensor]: ...
def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Deals this rank's rows out to all ranks, and joins what they deal to it; gradients flow through it.

    Args:
        tensor: Of one dtype on all ranks, and of one shape but for the first dimension.
        splits: How many rows each rank gets, in rank order, as torch.int32 or a list; None: all get as many.
        name: What ranks are matched by; None: their order among those without a name.
        process_set: Who takes part.

    Returns:
        The rows from all ranks, in rank order; with `splits` also how many came from each.

    Raises:
        ValueError: The splits do not fit the tensor and the ranks, this rank is no member of the set,
            or an operation of that name is under way.
        HorovodInternalError: Ranks disagree, or somebody is gone; says who sent what.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


class _Alltoall(torch.autograd.Function):
    """Gradients go back the way that the rows came."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.shape, ctx.name, ctx.process_set = received, tensor.shape, name, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name = gradient_name(ctx.name)
        back, _ = synchronize(alltoall_async(gradients[0].contiguous(), ctx.received, name, ctx.process_set))
        rest = ctx.shape[0] - back.shape[0]  # rows that the splits left out went nowhere
        return torch.cat([back, back.new_zeros(rest, *ctx.shape[1:])]), None, None, None


def _counts(tensor: Tensor, splits: Splits, ranks: int) -> list[int]:
    """Rows for each rank."""
    if tensor.dim() == 0:
        raise ValueError("alltoall deals out rows, and a 0-d tensor has none: reshape it to (1,)")
    rows = tensor.shape[0]
    if splits is None:
        if rows % ranks:
            raise ValueError(
                f"alltoall without splits: {rows} rows cannot be dealt out equally to {ranks} ranks"
            )
        return [rows // ranks] * ranks
    if isinstance(splits, Tensor) and (splits.dtype is not torch.int32 or splits.dim() != 1):
        raise ValueError(
            f"alltoall: splits are {splits.dtype} of {splits.dim()} dimension(s); they are numbers of rows,"
            " torch.int32 of one dimension"
        )
    counts = [int(count) for count in splits]
    if len(counts) != ranks or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"alltoall: splits are {counts}; expected {ranks} numbers, one for each rank, none below 0,"
            f" that add up to at most the {rows} rows of the tensor"
        )
    return counts
