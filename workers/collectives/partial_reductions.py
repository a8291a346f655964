"""Reductions whose result goes to one member, or in parts to each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hubring.ps.core.messages import Collective, ReduceOp
from hubring.workers.collectives.group import Group
from hubring.workers.collectives.start import begin, like, tensor_of, tensors_of
from hubring.workers.communicators.base import CollectiveWork, Communicator

__all__ = [
    "grouped_reduce_scatter",
    "grouped_reduce_scatter_async",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
]


def reduce(
    tensor: Tensor,
    root: int = 0,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor | None:
    """As `allreduce`, but only the root gets the result; other members get None."""
    result: Tensor | None = reduce_async(tensor, root, op, name, group=group, communicator=communicator).get()
    return result


def reduce_async(
    tensor: Tensor,
    root: int = 0,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `reduce`."""
    return begin(Collective.REDUCE, [tensor], name, group, communicator, op=op, root=root)


def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Returns this member's rows of the `allreduce` result.

    If the rows do not divide evenly, the first members get one row more.
    """
    return tensor_of(reduce_scatter_async(tensor, op, name, group=group, communicator=communicator))


def reduce_scatter_async(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `reduce_scatter`."""
    return begin(Collective.REDUCE_SCATTER, [tensor], name, group, communicator, op=op)


def grouped_reduce_scatter(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """As `reduce_scatter` of each tensor, in one exchange."""
    return tensors_of(grouped_reduce_scatter_async(tensors, op, name, group=group, communicator=communicator))


def grouped_reduce_scatter_async(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `grouped_reduce_scatter`."""
    then = like(tensors)
    return begin(Collective.REDUCE_SCATTER, tensors, name, group, communicator, op=op, then=then)
