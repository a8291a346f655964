"""Horovod's allreduce: one tensor or many, in place or not, synchronous or with a handle."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from hubring.workers import collectives
from hubring.workers.collectives.groups import waiting
from hubring.workers.horovod.collectives.compression import Compression, Compressor
from hubring.workers.horovod.collectives.operation import (
    Reduction,
    begin_reduction,
    chosen,
    gradient_name,
    in_place,
    synchronize,
)
from hubring.workers.horovod.world import OperationCall, ProcessSet, global_process_set

Tensor = torch.Tensor

START = collectives.grouped_allreduce_async


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce. Arguments and errors are those of `allreduce`.

    Returns:
        A handle; `synchronize` returns a new tensor.
    """
    how = Reduction(chosen(op, average), prescale_factor, postscale_factor)
    return begin_reduction(OperationCall("allreduce", name, process_set), START, [tensor], how, itemgetter(0))


allreduce_async_ = in_place(allreduce_async)
"""Like `allreduce_async`, but `synchronize` writes the result into `tensor`, and returns `tensor`."""


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces tensors with the same shape and dtype over the ranks. Differentiable.

    Args:
        tensor: This rank's tensor; not modified.
        average: The older form of `op`.
        name: Matches the operation across ranks; None: the call order of operations without a name.
        compression: Compresses the tensor for the exchange.
        op: The reduction; None: `hvd.Average`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A new tensor, the same on all ranks of the set.

    Raises:
        ValueError: `op` and `average` are both set, `op` is unknown, this rank is not a member of the set,
            or an operation with this name is running.
        NotImplementedError: Adasum of a process set, or of a number of ranks that is not a power of 2.
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    op = chosen(op, average)
    small, ctx = compression.compress(tensor)
    factors = prescale_factor, postscale_factor
    return compression.decompress(HorovodAllreduce.apply(small, None, name, op, *factors, process_set), ctx)


allreduce_ = waiting(allreduce_async_, synchronize)
"""Like `allreduce`, but writes the result into `tensor`, and returns `tensor`. Not differentiable."""


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts the allreduce of many tensors in one exchange; `synchronize` returns a tuple."""
    how = Reduction(chosen(op, average), prescale_factor, postscale_factor)
    return begin_reduction(OperationCall("grouped_allreduce", name, process_set), START, tensors, how, tuple)


grouped_allreduce_async_ = in_place(grouped_allreduce_async)
"""Like `grouped_allreduce_async`, but writes the results into `tensors`."""


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Runs `allreduce` of many tensors in one exchange."""
    op = chosen(op, average)
    small = [compression.compress(tensor) for tensor in tensors]
    given = [tensor for tensor, _ in small]
    factors = prescale_factor, postscale_factor
    results = HorovodGroupedAllreduce.apply(None, name, op, *factors, process_set, *given)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, small, strict=True)]


grouped_allreduce_ = waiting(grouped_allreduce_async_, synchronize)
"""Runs `allreduce_` of many tensors in one exchange."""


class HorovodAllreduce(torch.autograd.Function):
    """`allreduce` without compression. The gradient is the same reduction of the ranks' gradients.

    The arguments of `apply` are those of `allreduce_async`.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, average: bool | None, name: str | None, op: int | None, *rest: Any
    ) -> Tensor:
        op = chosen(op, average)
        ctx.rest = None, gradient_name(name), op, *rest
        return synchronize(allreduce_async(tensor, None, name, op, *rest))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return HorovodAllreduce.apply(gradients[0].contiguous(), *ctx.rest), *[None] * len(ctx.rest)


class HorovodGroupedAllreduce(torch.autograd.Function):
    """`HorovodAllreduce` for many tensors, which come last."""

    @staticmethod
    def forward(ctx: Any, average: bool | None, name: str | None, op: int | None, *rest: Any) -> Any:
        op, how, tensors = chosen(op, average), rest[:3], rest[3:]
        ctx.rest = None, gradient_name(name), op, *how
        return synchronize(grouped_allreduce_async(tensors, None, name, op, *how))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given = [gradient.contiguous() for gradient in gradients]
        return *[None] * len(ctx.rest), *HorovodGroupedAllreduce.apply(*ctx.rest, *given)
