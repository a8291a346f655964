"""Horovod's broadcast: copies the root's tensor to every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hubring.workers import collectives
from hubring.workers.horovod.collectives.allreduce import allreduce
from hubring.workers.horovod.collectives.operation import (
    Average,
    gradient_name,
    sendable,
    synchronize,
    written,
)
from hubring.workers.horovod.world import (
    OperationCall,
    ProcessSet,
    checked,
    current,
    global_process_set,
)

Tensor = torch.Tensor


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast, and returns a handle. Arguments and errors are those of `broadcast`."""
    return _begin(
        OperationCall("broadcast", name, process_set), sendable(tensor), root_rank, lambda result: result
    )


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like `broadcast_async`, but `synchronize` writes the result into `tensor`, and returns `tensor`."""
    sendable(tensor)
    return overwrite_async(tensor, root_rank, name, process_set)


def overwrite_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`broadcast_async_` for parameters, which can have any memory format."""
    return _begin(
        OperationCall("broadcast", name, process_set),
        tensor,
        root_rank,
        lambda result: written(tensor, result),
    )


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
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


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Like `broadcast`, but writes the result into `tensor`, and returns `tensor`. Not differentiable."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


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


def _begin(call: OperationCall, tensor: Tensor, root_rank: int, finish: Callable[[Tensor], Tensor]) -> int:
    world, ranks = current(), checked(call.process_set).ranks
    if root_rank not in ranks:
        raise ValueError(f"root_rank is {root_rank}; expected one of the members {ranks}")
    start = partial(collectives.broadcast_async, tensor.detach(), world.members[root_rank])
    return world.begin(call, start, finish)
