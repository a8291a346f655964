"""Reductions of sparse tensors, such as an embedding's gradients, by gathering their entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import ReduceOp
from hubring.ps.store.collective import layout_of
from hubring.ps.store.collective_reduction import WIDER, objection_to


def parts(tensor: Tensor, op: ReduceOp) -> list[Tensor]:
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
    coalesced = _wide(tensor.detach()).coalesce()
    return [coalesced.indices().t(), coalesced.values(), torch.tensor([tuple(tensor.shape)])]


def total(tensor: Tensor, op: ReduceOp, members: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Returns a function that makes the coalesced sum or average from the allgather of `parts`."""
    shape, device, dtype = tensor.shape, tensor.device, tensor.dtype

    def then(came: Sequence[Tensor]) -> Tensor:
        places, values, shapes = came
        if (shapes != shapes[0]).any():
            raise ConfigError(
                f"ranks pass sparse tensors of different shapes, in rank order: {shapes.tolist()};"
                " pass the same shape on all ranks"
            )
        if op is ReduceOp.AVERAGE:
            values = values / members
        summed = torch.sparse_coo_tensor(places.t(), values, shape, check_invariants=True).coalesce()
        return summed.to(device, dtype)

    return then


def _wide(tensor: Tensor) -> Tensor:
    """Converts to the dtype of dense sums, so that half precision is rounded once, at the end."""
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))
