"""Reductions: allreduce, for all members, and reduce and reduce_scatter, for some.

Sparse tensors, such as an embedding's gradients, are reduced by gathering their entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import Collective, ReduceOp
from hubring.ps.store.collective import WIDER, layout_of, objection_to
from hubring.workers.collectives.groups import Scope, begin, into, like, tensor_of, tensors_of, waiting
from hubring.workers.communicators.base import CollectiveWork

__all__ = ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["reduce", "reduce_async", "reduce_scatter", "reduce_scatter_async"]
__all__ += ["grouped_reduce_scatter", "grouped_reduce_scatter_async"]


def sparse_parts(tensor: Tensor, op: ReduceOp) -> list[Tensor]:
    """Returns a sparse COO tensor's indices, values and shape as rows, for an allgather.

    Raises:
        UsageError: `op` does not support sparse tensors.
        ConfigError: `op` does not support the dtype.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UsageError(
            f"{op.name.lower()} does not support sparse tensors: use sum or average, or call to_dense()"
        )
    if text := objection_to(op, layout_of(tensor).dtype):
        raise ConfigError(text)
    # In the dtype of dense sums, so that half precision is rounded once, at the end.
    coalesced = tensor.detach().to(WIDER.get(tensor.dtype, tensor.dtype)).coalesce()
    return [coalesced.indices().t(), coalesced.values(), torch.tensor([tuple(tensor.shape)], device="cpu")]


def sparse_total(tensor: Tensor, op: ReduceOp) -> Callable[[Sequence[Tensor]], Tensor]:
    """Returns a function that makes the coalesced sum or average from the allgather of `sparse_parts`."""
    shape, device, dtype = tensor.shape, tensor.device, tensor.dtype

    def then(came: Sequence[Tensor]) -> Tensor:
        places, values, shapes = came
        if (shapes != shapes[0]).any():
            raise ConfigError(
                f"ranks pass sparse tensors of different shapes, in rank order: {shapes.tolist()};"
                " pass the same shape on all ranks"
            )
        if op is ReduceOp.AVERAGE:
            values = values / len(shapes)  # one row for each member
        summed = torch.sparse_coo_tensor(
            places.t(), values, shape, device=values.device, check_invariants=True
        )
        return summed.coalesce().to(device, dtype)

    return then


def allreduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.AVERAGE, name: str | None = None, **scope: Unpack[Scope]
) -> Tensor:
    """Reduces the members' tensors, which must have the same shape and dtype, to one.

    Args:
        tensor: This rank's tensor, of any shape; it is only read. Sparse COO tensors can only be summed
            or averaged; their indices may differ between members.
        op: The operation. AVERAGE and ADASUM need a floating dtype. The sum of booleans is true if any
            is true, the product if all are true.
        name: The name that calls are matched by.
        **scope: `group`, a group of ranks (None: all), and `communicator`; see `Scope`.

    Returns:
        A new tensor of the same shape, dtype and device, equal on all members.
    """
    return _allreduce(tensor, op, name, **scope)


def allreduce_async(
    tensor: Tensor, op: ReduceOp = ReduceOp.AVERAGE, name: str | None = None, **scope: Unpack[Scope]
) -> CollectiveWork:
    """Starts `allreduce`."""
    if isinstance(tensor, Tensor) and tensor.is_sparse:
        given, then = sparse_parts(tensor, op), sparse_total(tensor, op)
        return begin(Collective.ALLGATHER, given, name or "allreduce", scope, then=then)
    return begin(Collective.ALLREDUCE, [tensor], name, scope, op=op)


def allreduce_async_(
    tensor: Tensor, op: ReduceOp = ReduceOp.AVERAGE, name: str | None = None, **scope: Unpack[Scope]
) -> CollectiveWork:
    """Starts `allreduce`, and writes the result to `tensor` before the work is done."""
    return begin(Collective.ALLREDUCE, [tensor], name, scope, op=op, then=into(tensor))


_allreduce = waiting(allreduce_async, tensor_of)

allreduce_ = waiting(allreduce_async_, tensor_of)
"""As `allreduce`, but writes the result to `tensor` and returns it."""


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    **scope: Unpack[Scope],
) -> CollectiveWork:
    """Starts `allreduce` of each tensor, in one exchange. Shapes and dtypes may be mixed."""
    return begin(Collective.ALLREDUCE, tensors, name, scope, op=op, then=like(tensors))


grouped_allreduce = waiting(grouped_allreduce_async, tensors_of)
"""As `allreduce` of each tensor, in one exchange. Shapes and dtypes may be mixed."""


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    **scope: Unpack[Scope],
) -> CollectiveWork:
    """Starts `grouped_allreduce`, and writes the results to `tensors` before the work is done."""
    return begin(Collective.ALLREDUCE, tensors, name, scope, op=op, then=into(*tensors, many=True))


grouped_allreduce_ = waiting(grouped_allreduce_async_, tensors_of)
"""As `grouped_allreduce`, but writes the results to `tensors`."""


def reduce(
    tensor: Tensor,
    root: int = 0,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    **scope: Unpack[Scope],
) -> Tensor | None:
    """As `allreduce`, but only the root gets the result; other members get None."""
    result: Tensor | None = reduce_async(tensor, root, op, name, **scope).get()
    return result


def reduce_async(
    tensor: Tensor,
    root: int = 0,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    **scope: Unpack[Scope],
) -> CollectiveWork:
    """Starts `reduce`."""
    return begin(Collective.REDUCE, [tensor], name, scope, op=op, root=root)


def reduce_scatter_async(
    tensor: Tensor, op: ReduceOp = ReduceOp.AVERAGE, name: str | None = None, **scope: Unpack[Scope]
) -> CollectiveWork:
    """Starts an `allreduce` of which each member gets some rows.

    If the rows do not divide evenly, the first members get one row more.
    """
    return begin(Collective.REDUCE_SCATTER, [tensor], name, scope, op=op)


reduce_scatter = waiting(reduce_scatter_async, tensor_of)
"""Returns this member's rows of the `allreduce` result.

If the rows do not divide evenly, the first members get one row more.
"""


def grouped_reduce_scatter_async(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    **scope: Unpack[Scope],
) -> CollectiveWork:
    """Starts `reduce_scatter` of each tensor, in one exchange."""
    return begin(Collective.REDUCE_SCATTER, tensors, name, scope, op=op, then=like(tensors))


grouped_reduce_scatter = waiting(grouped_reduce_scatter_async, tensors_of)
"""As `reduce_scatter` of each tensor, in one exchange."""
