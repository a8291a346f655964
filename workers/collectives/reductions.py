"""Reductions whose result goes to all members."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hubring.ps.core.messages import Collective, ReduceOp
from hubring.workers.collectives import sparse
from hubring.workers.collectives.group import Group
from hubring.workers.collectives.start import begin, into, like, tensor_of, tensors_of
from hubring.workers.communicators.base import CollectiveWork, Communicator
from hubring.workers.runtime import context

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def allreduce(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Reduces the members' tensors, which must have the same shape and dtype, to one.

    Args:
        tensor: This rank's tensor, of any shape; it is only read. Sparse COO tensors can only be summed
            or averaged; their indices may differ between members.
        op: The operation. AVERAGE and ADASUM need a floating dtype. The sum of booleans is true if any
            is true, the product if all are true.
        name: The name that calls are matched by.
        group: The members; None: all ranks.
        communicator: None uses the communicator of `hubring.init()`.

    Returns:
        A new tensor of the same shape, dtype and device, equal on all members.
    """
    return tensor_of(allreduce_async(tensor, op, name, group=group, communicator=communicator))


def allreduce_async(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `allreduce`."""
    if tensor.is_sparse:
        communicator = communicator or context.current().communicator
        then = sparse.total(tensor, op, communicator.size if group is None else group.size())
        given = sparse.parts(tensor, op)
        return begin(Collective.ALLGATHER, given, name or "allreduce", group, communicator, then=then)
    return begin(Collective.ALLREDUCE, [tensor], name, group, communicator, op=op)


def allreduce_(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """As `allreduce`, but writes the result to `tensor` and returns it."""
    return tensor_of(allreduce_async_(tensor, op, name, group=group, communicator=communicator))


def allreduce_async_(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `allreduce_`. The tensor is written before the work is done."""
    then = into(tensor)
    return begin(Collective.ALLREDUCE, [tensor], name, group, communicator, op=op, then=then)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """As `allreduce` of each tensor, in one exchange. Shapes and dtypes may be mixed."""
    return tensors_of(grouped_allreduce_async(tensors, op, name, group=group, communicator=communicator))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `grouped_allreduce`."""
    then = like(tensors)
    return begin(Collective.ALLREDUCE, tensors, name, group, communicator, op=op, then=then)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """As `grouped_allreduce`, but writes the results to `tensors`."""
    return tensors_of(grouped_allreduce_async_(tensors, op, name, group=group, communicator=communicator))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `grouped_allreduce_`."""
    then = into(*tensors, many=True)
    return begin(Collective.ALLREDUCE, tensors, name, group, communicator, op=op, then=then)
