"""Reductions that go to one member, or some rows to each."""

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
    """As `allreduce`, for the root alone: the others get None."""
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
    """Begins `reduce`."""
    return begin(Collective.REDUCE, [tensor], name, group, communicator, op=op, root=root)


def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """This member's rows of what `allreduce` would give; the first get one more where they do not divide."""
    return tensor_of(reduce_scatter_async(tensor, op, name, group=group, communicator=communicator))


def reduce_scatter_async(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `reduce_scatter`."""
    return begin(Collective.REDUCE_SCATTER, [tensor], name, group, communicator, op=op)


def grouped_reduce_scatter(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """`reduce_scatter` of many tensors in one exchange; results as if one by one."""
    return tensors_of(grouped_reduce_scatter_async(tensors, op, name, group=group, communicator=communicator))


def grouped_reduce_scatter_async(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `grouped_reduce_scatter`."""
    then = like(tensors)
    return begin(Collective.REDUCE_SCATTER, tensors, name, group, communicator, op=op, then=then)
