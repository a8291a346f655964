"""Horovod's allgather: concatenates the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hubring.workers import collectives
from hubring.workers.horovod.collectives.allreduce import allreduce, gradient_name, grouped_allreduce
from hubring.workers.horovod.collectives.sendable import sendable
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.reduce_ops import Average
from hubring.workers.horovod.world.process_set import ProcessSet, checked, global_process_set
from hubring.workers.horovod.world.world import current

Tensor = torch.Tensor


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather, and returns a handle. Arguments and errors are those of `allgather`."""
    world, members, given = current(), checked(process_set), sendable(tensor)

    def start(full: str) -> Any:
        return [
            collectives.allgather_async(given, full, group=members.group, communicator=world.communicator)
        ]

    return world.begin("allgather", name, members, start, lambda result: result)


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
    world, members = current(), checked(process_set)
    if not tensors:
        raise ValueError("grouped_allgather got no tensors; pass at least one")
    given = [sendable(tensor) for tensor in tensors]

    def start(full: str) -> Any:
        here = world.communicator
        return [collectives.grouped_allgather_async(given, full, group=members.group, communicator=here)]

    return world.begin("grouped_allgather", name, members, start, tuple)


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
    lengths = torch.tensor([[shape[0] if shape else 1 for shape in shapes]])
    before = synchronize(allgather_async(lengths, name, members))[: members.rank()].sum(0)
    rows = zip(wholes, before.tolist(), lengths[0].tolist(), shapes, strict=True)
    return [whole.narrow(0, start, length).reshape(shape) for whole, start, length, shape in rows]
