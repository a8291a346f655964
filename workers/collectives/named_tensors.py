"""Named tensors that all ranks get from rank 0: a model's buffers and frozen parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.collectives.differences import first_difference
from hubring.workers.communicators.base import Communicator

Named = Sequence[tuple[str, Tensor]]


def share_from_rank_0(named: Named, communicator: Communicator, name: str, timeout: float | None) -> None:
    """Overwrites tensors with rank 0's, after all ranks have compared names, shapes and dtypes.

    Args:
        named: Tensors of any dtype and layout, also expanded ones, by name. All ranks must call it, with or
            without tensors.
        communicator: Connects the ranks.
        name: Name of the collectives.
        timeout: Seconds that it may take; None: no limit.

    Raises:
        ConfigError: Two ranks differ. The error names both and the first difference.
    """
    if communicator.size == 1:
        return
    _compare(named, communicator, name)
    whole = [_plain(tensor) for _, tensor in named]
    broadcast_into(whole, communicator, name, timeout)
    with torch.no_grad():
        for (_, tensor), plain in zip(named, whole, strict=True):
            _fill(tensor, plain)


def _compare(named: Named, communicator: Communicator, name: str) -> None:
    lines = [f"{what} {str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for what, one in named]
    found = first_difference(lines, communicator, name)
    if found is not None:
        raise ConfigError(
            f"rank 0 and rank {found.rank} have models with different buffers or frozen parameters: rank 0"
            f" has {found.rank_0_has or 'none'}, rank {found.rank} has {found.rank_has or 'none'}; make the"
            " same model on all ranks"
        )


def _plain(tensor: Tensor) -> Tensor:
    """Returns a copy as an ordinary tensor: dense, contiguous, without lazy conjugation or expansion."""
    tensor = tensor.detach()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _fill(tensor: Tensor, plain: Tensor) -> None:
    """Overwrites a tensor of any layout in place."""
    if tensor.layout is not torch.strided:
        tensor.copy_(plain.to_sparse(layout=tensor.layout))
        return
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:  # expanded: all entries are the same memory
            tensor, plain = tensor.narrow(dimension, 0, 1), plain.narrow(dimension, 0, 1)
    tensor.copy_(plain)
