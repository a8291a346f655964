"""What Horovod's operations share: reductions, checks of tensors, `poll` and `synchronize`.

Also `barrier` and `join`, which have no tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, ParamSpec

import torch

from hubring.ps.core.messages import ReduceOp
from hubring.workers import collectives
from hubring.workers.communicators.base import CollectiveWork
from hubring.workers.horovod.collectives.handles import Handles
from hubring.workers.horovod.errors import translated
from hubring.workers.horovod.world import (
    OperationCall,
    ProcessSet,
    checked,
    current,
    global_process_set,
    started,
)

P = ParamSpec("P")

Average, Sum, Adasum, Min, Max, Product = range(6)

REDUCE_OPS = (
    *(ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM),
    *(ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT),
)
"""The operation of the exchange, by constant."""
NAMES = "hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product"


def chosen(op: int | None, average: bool | None) -> int:
    """Returns the reduction of `op`, or of the older `average`; Average if both are None.

    Raises:
        ValueError: Both are set, or `op` is unknown.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn("average= is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, 4)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in range(len(REDUCE_OPS)):
        raise ValueError(f"op is {op!r}; expected one of {NAMES}")
    return op


DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same tensor, detached from autograd.

    Hubring does not need contiguous tensors. It refuses others so that scripts see the same errors as in
    Horovod.

    Raises:
        ValueError: The tensor is sparse, has an unsupported dtype, or is not contiguous.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError(
            f"Tensor is required to be contiguous, but the tensor of shape {tuple(tensor.shape)} has strides"
            f" {tensor.stride()}; call contiguous()"
        )
    return tensor.detach()


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction and its factors.

    Integer tensors are scaled as in Horovod: in float64, truncated toward zero. Their average is the sum,
    divided in the same way.

    Attributes:
        op: One of the constants of `hubring.workers.horovod.collectives.operation`.
        prescale: Multiplies tensors before the reduction.
        postscale: Multiplies tensors after the reduction.
    """

    op: int
    prescale: float = 1.0
    postscale: float = 1.0

    def check(self, process_set: ProcessSet) -> None:
        """Refuses the calls that Horovod refuses.

        Raises:
            NotImplementedError: Adasum of a process set, or of a number of ranks that is not a power of 2.
        """
        if self.op != Adasum:
            return
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        size = len(process_set.ranks)
        if size & (size - 1):
            raise NotImplementedError(f"Adasum needs a power of 2 of ranks, but the job has {size}.")

    def wire(self, tensors: Sequence[torch.Tensor]) -> ReduceOp:
        """Returns the operation of the exchange.

        Raises:
            ValueError: The average of booleans.
        """
        if self.op == Average and any(tensor.dtype is torch.bool for tensor in tensors):
            raise ValueError("no average of torch.bool; use op=hvd.Max for any(), or op=hvd.Min for all()")
        return ReduceOp.SUM if self._divides(tensors) else REDUCE_OPS[self.op]

    def after(self, results: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
        """Returns the results for the script, from the results of the exchange."""
        if self._divides(results):
            results = [_divided(result, ranks) for result in results]
        return [scaled(result, self.postscale) for result in results]

    def _divides(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self.op == Average and not all(tensor.is_floating_point() for tensor in tensors)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns the tensor times `factor` in its dtype; the same tensor if `factor` is 1."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def _divided(tensor: torch.Tensor, by: int) -> torch.Tensor:
    return torch.div(tensor, by, rounding_mode=None if tensor.is_floating_point() else "trunc")


def begin_reduction(
    call: OperationCall,
    exchange: Callable[..., CollectiveWork],
    tensors: Sequence[torch.Tensor],
    how: Reduction,
    finish: Callable[[list[torch.Tensor]], Any],
) -> int:
    """Starts a reduction, and returns its handle.

    Args:
        call: The operation.
        exchange: Starts the exchange of several tensors.
        tensors: This rank's tensors.
        how: The reduction.
        finish: Returns the operation's result from the reduced tensors.

    Raises:
        ValueError: There is no tensor, or one that cannot be sent; or see `HorovodWorld.begin`.
    """
    world, members = current(), checked(call.process_set)
    how.check(members)
    if not tensors:
        raise ValueError(f"{call.kind} got no tensors; pass at least one")
    given, ranks = [scaled(sendable(tensor), how.prescale) for tensor in tensors], len(members.ranks)
    start = partial(exchange, given, how.wire(given))
    return world.begin(call, start, lambda got: finish(how.after(got, ranks)))


def gradient_name(name: str | None) -> str | None:
    """Returns the name of the exchange of an operation's gradient."""
    return None if name is None else f"{name}.gradient"


def in_place(start: Callable[P, int]) -> Callable[P, int]:
    """Returns the form of an operation that writes its results into its first argument, and returns that."""
    first = next(iter(signature(start).parameters))

    @wraps(start)
    def begin(*args: P.args, **kwargs: P.kwargs) -> int:
        handle = start(*args, **kwargs)
        current().handles.write(handle, args[0] if args else kwargs[first])
        return handle

    begin.__name__ = begin.__qualname__ = f"{start.__name__}_"  # pickle looks it up by this
    begin.__doc__ = f"Starts `{start.__name__}`; the results are written into `{first}`."
    return begin


def poll(handle: int) -> bool:
    """Whether the operation has ended. If so, the tensor of an in-place operation holds the result.

    Raises:
        ValueError: The handle is unknown, or was synchronized before.
    """
    world = started()
    return (Handles() if world is None else world.handles).poll(handle)


def synchronize(handle: int) -> Any:
    """Waits until an operation ends.

    Returns:
        The result: a tensor or a tuple of tensors; None for a handle that was synchronized before.

    Raises:
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    world = started()
    return None if world is None else world.handles.synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once every rank of the set has called it.

    Raises:
        ValueError: This rank is not a member of the set.
        HorovodInternalError: A rank is lost.
    """
    synchronize(current().begin(OperationCall("barrier", None, process_set), collectives.barrier_async))


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and waits until all ranks have called `join`.

    Until then this rank contributes zeros to the others' allreduces. Their barriers do not wait for it. Any
    other operation, such as an allgather or a sparse allreduce, raises HorovodInternalError on the ranks that
    call it, as in Horovod: this rank's part would be missing.

    Args:
        device: Accepted, but has no effect: Horovod allocates the zeros there, but Hubring allocates none.

    Returns:
        The last rank that called `join`.

    Raises:
        HorovodInternalError: A rank is lost.
    """
    world = current()
    with translated():
        last = collectives.join(communicator=world.communicator)
    world.recount_unnamed()
    return world.members.index(last)
