"""Horovod's broadcast, allgather and alltoall, and its sparse allreduce.

A sparse allreduce is an allgather of indices and values; repeated indices add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import torch

from hubring.workers import collectives
from hubring.workers.collectives.groups import waiting
from hubring.workers.horovod.collectives.allreduce import allreduce, grouped_allreduce
from hubring.workers.horovod.collectives.operation import (
    Average,
    Sum,
    gradient_name,
    in_place,
    sendable,
    synchronize,
)
from hubring.workers.horovod.world import OperationCall, ProcessSet, checked, current, global_process_set

Tensor = torch.Tensor


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast, and returns a handle. Arguments and errors are those of `broadcast`."""
    return _begin_broadcast(sendable(tensor), root_rank, name, process_set)


broadcast_async_ = in_place(broadcast_async)
"""Like `broadcast_async`, but `synchronize` writes the result into `tensor`, and returns `tensor`."""


def _begin_broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    world, ranks = current(), checked(process_set).ranks
    if root_rank not in ranks:
        raise ValueError(f"root_rank is {root_rank}; expected one of the members {ranks}")
    start = partial(collectives.broadcast_async, tensor.detach(), world.members[root_rank])
    return world.begin(OperationCall("broadcast", name, process_set), start)


overwrite_async = in_place(_begin_broadcast)
"""`broadcast_async_` for parameters, which can have any memory format."""


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copies the root's tensor to every rank. Differentiable; the gradient goes to the root.

    Args:
        tensor: The same shape and dtype on all ranks; only the root's values are used.
        root_rank: A rank of the whole job, even with a process set.
        name: Matches the operation across ranks; None: the call order of operations without a name.
        process_set: The ranks that take part.

    Returns:
        A new tensor.

    Raises:
        ValueError: The root or this rank is not a member of the set, or an operation with this name is
            running.
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)


broadcast_ = waiting(broadcast_async_, synchronize)
"""Like `broadcast`, but writes the result into `tensor`, and returns `tensor`. Not differentiable."""


class HorovodBroadcast(torch.autograd.Function):
    """`broadcast`. As in Horovod, the gradient is the ranks' mean on the root, and zeros elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name = gradient_name(ctx.name)
        mean = allreduce(gradients[0].contiguous(), name=name, op=Average, process_set=ctx.process_set)
        return (mean if current().rank == ctx.root_rank else torch.zeros_like(mean)), None, None, None


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather, and returns a handle. Arguments and errors are those of `allgather`."""
    start = partial(collectives.allgather_async, sendable(tensor))
    return current().begin(OperationCall("allgather", name, process_set), start)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenates the ranks' tensors along the first dimension. Differentiable.

    Args:
        tensor: The same dtype, and the same shape except for the first dimension, on all ranks. A 0-d tensor
            is one row.
        name: Matches the operation across ranks; None: the call order of operations without a name.
        process_set: The ranks that take part.

    Returns:
        All rows in rank order.

    Raises:
        ValueError: This rank is not a member of the set, or an operation with this name is running.
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    return HorovodAllgather.apply(tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts the allgather of many tensors in one exchange; `synchronize` returns a tuple."""
    if not tensors:
        raise ValueError("grouped_allgather got no tensors; pass at least one")
    start = partial(collectives.grouped_allgather_async, [sendable(tensor) for tensor in tensors])
    return current().begin(OperationCall("grouped_allgather", name, process_set), start, tuple)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Runs `allgather` of many tensors in one exchange."""
    return list(HorovodGroupedAllgather.apply(name, process_set, *tensors))


class HorovodAllgather(torch.autograd.Function):
    """`allgather`. The gradient is this rank's rows of the mean of the ranks' gradients, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.shape, ctx.name, ctx.process_set = tensor.shape, name, process_set
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, members = gradient_name(ctx.name), ctx.process_set
        mean = allreduce(gradients[0].contiguous(), name=name, op=Average, process_set=members)
        return _own_rows([mean], [ctx.shape], name, members)[0], None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """`HorovodAllgather` for many tensors."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.shapes, ctx.name, ctx.process_set = [tensor.shape for tensor in tensors], name, process_set
        return synchronize(grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, members = gradient_name(ctx.name), ctx.process_set
        given = [gradient.contiguous() for gradient in gradients]
        means = grouped_allreduce(given, name=name, op=Average, process_set=members)
        return None, None, *_own_rows(means, ctx.shapes, name, members)


def _own_rows(
    wholes: Sequence[Tensor], shapes: Sequence[torch.Size], name: str | None, members: ProcessSet
) -> list[Tensor]:
    """Returns this rank's rows of each tensor; the ranks exchange their lengths to find them."""
    lengths = torch.tensor([[shape[0] if shape else 1 for shape in shapes]], device="cpu")
    before = synchronize(allgather_async(lengths, name, members))[: members.rank()].sum(0)
    rows = zip(wholes, before.tolist(), lengths[0].tolist(), shapes, strict=True)
    return [whole.narrow(0, start, length).reshape(shape) for whole, start, length, shape in rows]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the sum or the average of sparse tensors with the same shape.

    Args:
        tensor: In torch's COO layout. The ranks can have different elements, or none.
        name: Matches the operation across ranks.
        op: `hvd.Average` or `hvd.Sum`.
        process_set: The ranks that take part.

    Returns:
        A function that waits and returns the result, a sparse tensor whose indices can repeat.

    Raises:
        ValueError: `op` is another reduction, this rank is not a member of the set, or an operation with this
            name is running.
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async: op is {op!r}; expected one of hvd.Average, hvd.Sum")
    members = checked(process_set)
    rows = tensor._indices().transpose(0, 1).contiguous()
    indices = allgather_async(rows, f"{name}.indices", members)
    values = allgather_async(tensor._values().contiguous(), f"{name}.values", members)

    def result() -> torch.Tensor:
        where, what = synchronize(indices).transpose(0, 1), synchronize(values)
        if op == Average:
            what = what / len(members.ranks)
        return torch.sparse_coo_tensor(where, what, tensor.shape, device=what.device, check_invariants=False)

    return result


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
    start = partial(collectives.alltoall_async, sendable(tensor)[: sum(counts)], counts)

    def finish(result: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
        output, received = result
        return output, torch.as_tensor(received, dtype=torch.int32, device="cpu")

    return world.begin(OperationCall("alltoall", name, members), start, finish)


@overload
def alltoall(
    tensor: Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = ...
) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int], name: str | None = None, process_set: ProcessSet = ...
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
            an operation with this name is running.
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
