"""Horovod's alltoall: each rank sends a part of its rows to every rank."""

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
    """Starts an alltoall. Arguments and errors are those of `alltoall`.

    Returns:
        A handle; `synchronize` returns (output, received_splits), even without `splits`.
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
    """Sends a part of this rank's rows to every rank, and concatenates the received rows. Differentiable.

    Args:
        tensor: The same dtype, and the same shape except for the first dimension, on all ranks.
        splits: Number of rows for each rank, in rank order, as torch.int32 or a list; None: equal parts.
        name: Matches the operation across ranks; None: the call order of operations without a name.
        process_set: The ranks that take part.

    Returns:
        The rows from all ranks, in rank order; with `splits` also the number of rows from each rank.

    Raises:
        ValueError: The splits do not fit the tensor and the ranks, this rank is not a member of the set, or
            an
            operation with this name is running.
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    result: Tensor | tuple[Tensor, Tensor] = HorovodAlltoall.apply(tensor, splits, name, process_set)
    return result


class HorovodAlltoall(torch.autograd.Function):
    """`alltoall`. Gradients return to the ranks that sent the rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.shape, ctx.name, ctx.process_set = received, tensor.shape, name, process_set
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name = gradient_name(ctx.name)
        back, _ = synchronize(alltoall_async(gradients[0].contiguous(), ctx.received, name, ctx.process_set))
        rest = ctx.shape[0] - back.shape[0]  # rows that are in no split were not sent
        return torch.cat([back, back.new_zeros(rest, *ctx.shape[1:])]), None, None, None


def _counts(tensor: Tensor, splits: Splits, ranks: int) -> list[int]:
    """Returns the number of rows for each rank."""
    if tensor.dim() == 0:
        raise ValueError("alltoall of a 0-d tensor: expected at least one dimension; reshape it to (1,)")
    rows = tensor.shape[0]
    if splits is None:
        if rows % ranks:
            raise ValueError(
                f"alltoall without splits: {rows} rows do not divide evenly among {ranks} ranks; pass splits"
            )
        return [rows // ranks] * ranks
    if isinstance(splits, Tensor) and (splits.dtype is not torch.int32 or splits.dim() != 1):
        raise ValueError(
            f"alltoall: splits are {splits.dtype} with {splits.dim()} dimension(s);"
            " expected numbers of rows as torch.int32 with one dimension"
        )
    counts = [int(count) for count in splits]
    if len(counts) != ranks or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"alltoall: splits are {counts}; expected {ranks} numbers of at least 0, one for each rank,"
            f" that add up to at most the {rows} rows of the tensor"
        )
    return counts
