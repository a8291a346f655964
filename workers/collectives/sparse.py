"""Sparse gradients, as an embedding's: what is summed is gathered, since most of it is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import ReduceOp
from hubring.ps.store.collective import layout_of
from hubring.ps.store.collective_reduction import WIDER, objection_to


def parts(tensor: Tensor, op: ReduceOp) -> list[Tensor]:
    """A sparse COO tensor as what an allgather takes: its places, its values, and its shape, as rows.

    Raises:
        UsageError: There is no such reduction of sparse tensors.
        ConfigError: There is none of the dtype.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UsageError(f"no {op.name.lower()} of sparse tensors: sum or average them, or call to_dense()")
    if text := objection_to(op, layout_of(tensor).dtype):
        raise ConfigError(text)
    coalesced = _wide(tensor.detach()).coalesce()
    return [coalesced.indices().t(), coalesced.values(), torch.tensor([tuple(tensor.shape)])]


def total(tensor: Tensor, op: ReduceOp, members: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Makes the members' sum of what an allgather of their parts gives, coalesced; or their average."""
    shape, device, dtype = tensor.shape, tensor.device, tensor.dtype

    def then(came: Sequence[Tensor]) -> Tensor:
        places, values, shapes = came
        if (shapes != shapes[0]).any():
            raise ConfigError(f"ranks disagree on the shape of a sparse tensor: {shapes.tolist()}")
        if op is ReduceOp.AVERAGE:
            values = values / members
        summed = torch.sparse_coo_tensor(places.t(), values, shape, check_invariants=True).coalesce()
        return summed.to(device, dtype)

    return then


def _wide(tensor: Tensor) -> Tensor:
    """As dense sums are taken: half precision is rounded once, at the end."""
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))
