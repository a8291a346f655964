"""Horovod's reducescatter: a reduction of which each rank gets a part of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from hubring.workers import collectives
from hubring.workers.horovod.collectives.compression import Compression, Compressor
from hubring.workers.horovod.collectives.moving import allgather_async, grouped_allgather_async
from hubring.workers.horovod.collectives.operation import (
    Average,
    Reduction,
    Sum,
    begin_reduction,
    gradient_name,
    scaled,
    synchronize,
)
from hubring.workers.horovod.errors import RefusedCall
from hubring.workers.horovod.world import OperationCall, ProcessSet, current, global_process_set

Tensor = torch.Tensor


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter, and returns a handle. Arguments and errors are those of `reducescatter`."""
    how = Reduction(op, prescale_factor, postscale_factor)
    return _begin(OperationCall("reducescatter", name, process_set), [tensor], how, itemgetter(0))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces the ranks' tensors, and returns this rank's rows of the result. Differentiable.

    If the rows do not divide evenly among the ranks, the first ranks get one row more.

    Args:
        tensor: The same shape and dtype on all ranks; at least one dimension.
        name: Matches the operation across ranks; None: the call order of operations without a name.
        compression: Compresses the tensor for the exchange.
        op: `hvd.Average` or `hvd.Sum`.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        RefusedCall: `op` is another reduction.
        ValueError: The tensor is 0-d, sparse, not contiguous or has an unsupported dtype; this rank is not a
            member of the set; or an operation with this name is running.
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    small, ctx = compression.compress(tensor)
    factors = prescale_factor, postscale_factor
    return compression.decompress(HorovodReducescatter.apply(small, name, op, process_set, *factors), ctx)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts the reducescatter of many tensors; `synchronize` returns a tuple."""
    how = Reduction(op, prescale_factor, postscale_factor)
    return _begin(OperationCall("grouped_reducescatter", name, process_set), tensors, how, tuple)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Runs `reducescatter` of many tensors."""
    small = [compression.compress(tensor) for tensor in tensors]
    given = [tensor for tensor, _ in small]
    factors = prescale_factor, postscale_factor
    results = HorovodGroupedReducescatter.apply(name, op, process_set, *factors, *given)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, small, strict=True)]


class HorovodReducescatter(torch.autograd.Function):
    """`reducescatter` without compression.

    The gradient is the allgather of the ranks' gradients; for Sum times the ranks, as in Horovod. The
    arguments of `apply` are those of `reducescatter_async`.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str | None, op: int, process_set: ProcessSet, *factors: float
    ) -> Any:
        ctx.how, ctx.name, ctx.process_set = Reduction(op, *factors), gradient_name(name), process_set
        return synchronize(reducescatter_async(tensor, name, op, process_set, *factors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (grown,) = _grown(gradients, ctx.how, ctx.process_set)
        return synchronize(allgather_async(grown, ctx.name, ctx.process_set)), *[None] * 5


class HorovodGroupedReducescatter(torch.autograd.Function):
    """`HorovodReducescatter` for many tensors, which come last."""

    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, process_set: ProcessSet, *rest: Any) -> Any:
        factors, tensors = rest[:2], rest[2:]
        ctx.how, ctx.name, ctx.process_set = Reduction(op, *factors), gradient_name(name), process_set
        return synchronize(grouped_reducescatter_async(tensors, name, op, process_set, *factors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grown = _grown(gradients, ctx.how, ctx.process_set)
        return *[None] * 5, *synchronize(grouped_allgather_async(grown, ctx.name, ctx.process_set))


def _grown(gradients: Sequence[Tensor], how: Reduction, members: ProcessSet) -> list[Tensor]:
    """Returns the gradients times the factors of the reduction."""
    factor = how.prescale * how.postscale * (len(members.ranks) if how.op == Sum else 1)
    return [scaled(gradient, factor).contiguous() for gradient in gradients]


def _begin(
    call: OperationCall, tensors: Sequence[Tensor], how: Reduction, finish: Callable[[list[Tensor]], Any]
) -> int:
    current()
    if how.op not in (Average, Sum):
        raise RefusedCall(f"reducescatter: op is {how.op!r}; expected one of hvd.Average, hvd.Sum")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{call.kind}: expected tensors of at least one dimension")
    return begin_reduction(call, collectives.grouped_reduce_scatter_async, tensors, how, finish)
