"""What one member has, for all of them, or a part for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hubring.ps.core.messages import Call, Collective
from hubring.workers.collectives.group import Group
from hubring.workers.collectives.start import begin, into, like, tensor_of
from hubring.workers.communicators.base import CollectiveWork, Communicator

__all__ = [
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "scatter",
    "scatter_async",
]


def broadcast(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Gives every member the root's tensor; all pass one of its shape and dtype."""
    return tensor_of(broadcast_async(tensor, root, name, group=group, communicator=communicator))


def broadcast_async(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `broadcast`."""
    then = like([tensor], many=False)
    return begin(Collective.BROADCAST, [tensor], name, group, communicator, root=root, then=then)


def broadcast_(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """As `broadcast`, with the result in `tensor`, which is returned."""
    return tensor_of(broadcast_async_(tensor, root, name, group=group, communicator=communicator))


def broadcast_async_(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `broadcast_`."""
    then = into(tensor)
    return begin(Collective.BROADCAST, [tensor], name, group, communicator, root=root, then=then)


def scatter(
    tensors: Sequence[Tensor] | None,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Gives each member one of the root's tensors, of any shapes and dtypes, in rank order.

    Args:
        tensors: On the root one for each member; None elsewhere.
        root: Who gives.
        name: What ranks are matched by.
        group: Who takes part; None: all ranks.
        communicator: None takes that of `hubring.init()`.

    Returns:
        This rank's; on the CPU where it is not the root.
    """
    return tensor_of(scatter_async(tensors, root, name, group=group, communicator=communicator))


def scatter_async(
    tensors: Sequence[Tensor] | None,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `scatter`."""
    return begin(Collective.SCATTER, tensors or [], name, group, communicator, root=root)


def broadcast_into(
    tensors: Sequence[Tensor], communicator: Communicator, name: str, timeout: float | None
) -> None:
    """Overwrites tensors of any dtype with rank 0's, in one broadcast of their bytes."""
    if communicator.size == 1 or not tensors:
        return
    given = [torch.cat([_as_bytes(tensor).cpu() for tensor in tensors])] if communicator.rank == 0 else []
    whole = communicator.collective(Call(Collective.BROADCAST, name), *given).get(timeout)
    start = 0
    for tensor in tensors:
        piece = whole[start : start + tensor.nbytes]
        # A fresh copy: bytes in the middle of a tensor may be unaligned for a wider dtype.
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
