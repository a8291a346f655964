"""From one rank to others: broadcast, scatter, send and receive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Call, Collective
from hubring.workers.collectives.groups import Group, begin, into, like, tensor_of
from hubring.workers.communicators.base import CollectiveWork, Communicator, transfer_call
from hubring.workers.runtime import context

__all__ = [
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "recv",
    "recv_async",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
]


def broadcast(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Returns the root's tensor on every member. All members pass a tensor of its shape and dtype."""
    return tensor_of(broadcast_async(tensor, root, name, group=group, communicator=communicator))


def broadcast_async(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `broadcast`."""
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
    """As `broadcast`, but writes the result to `tensor` and returns it."""
    return tensor_of(broadcast_async_(tensor, root, name, group=group, communicator=communicator))


def broadcast_async_(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `broadcast_`."""
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
    """Sends each member one of the root's tensors, in rank order.

    Args:
        tensors: On the root, one tensor per member, of any shapes and dtypes; None on other ranks.
        root: The rank that sends.
        name: The name that calls are matched by.
        group: The members; None: all ranks.
        communicator: None uses the communicator of `hubring.init()`.

    Returns:
        This rank's tensor; on the CPU if this rank is not the root.
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
    """Starts `scatter`."""
    return begin(Collective.SCATTER, tensors or [], name, group, communicator, root=root)


def broadcast_into(
    tensors: Sequence[Tensor], communicator: Communicator, name: str, timeout: float | None
) -> None:
    """Overwrites tensors of any dtype with rank 0's tensors, in one broadcast of their bytes."""
    if communicator.size == 1 or not tensors:
        return
    given = [as_bytes(tensors)] if communicator.rank == 0 else []
    fill(tensors, communicator.collective(Call(Collective.BROADCAST, name), *given).get(timeout))


def as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of tensors of any dtype, one after the other, as a flat uint8 tensor on the CPU."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in tensors])


def fill(tensors: Sequence[Tensor], whole: Tensor) -> None:
    """Overwrites tensors with what `as_bytes` returned for tensors of the same shapes and dtypes."""
    start = 0
    for tensor in tensors:
        piece = whole[start : start + tensor.nbytes]
        # Clone, because bytes in the middle of a tensor may be unaligned for a wider dtype.
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes


def send(
    tensor: Tensor,
    to: int,
    name: str | None = None,
    *,
    communicator: Communicator | None = None,
) -> None:
    """Sends a tensor to one rank. Returns once that rank has called `recv`."""
    send_async(tensor, to, name, communicator=communicator).wait()


def send_async(
    tensor: Tensor,
    to: int,
    name: str | None = None,
    *,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `send`."""
    communicator = communicator or context.current().communicator
    return _transfer([tensor], communicator.rank, to, name, communicator)


def recv(source: int, name: str | None = None, *, communicator: Communicator | None = None) -> Tensor:
    """Returns a tensor on the CPU that one rank sends under this name, with its shape and dtype.

    Tensors with one name are received in the order in which they were sent.
    """
    return tensor_of(recv_async(source, name, communicator=communicator))


def recv_async(
    source: int, name: str | None = None, *, communicator: Communicator | None = None
) -> CollectiveWork:
    """Starts `recv`."""
    communicator = communicator or context.current().communicator
    return _transfer([], source, communicator.rank, name, communicator)


def _transfer(
    tensors: Sequence[Tensor], source: int, to: int, name: str | None, communicator: Communicator
) -> CollectiveWork:
    other = to if source == communicator.rank else source
    if other == communicator.rank or not 0 <= other < communicator.size:
        allowed = f"a rank from 0 to {communicator.size - 1} other than this rank, {communicator.rank}"
        raise UsageError(f"cannot send from rank {source} to rank {to}: pass {allowed}")
    return communicator.collective(transfer_call(name or "transfer", source, to), *tensors)
