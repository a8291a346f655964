"""Collectives that move tensors: broadcast, scatter, gather, allgather, alltoall, send and receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Call, Collective
from hubring.workers.collectives.groups import Scope, begin, into, like, tensor_of, tensors_of, waiting
from hubring.workers.communicators.base import CollectiveWork, Communicator, transfer_call
from hubring.workers.runtime import context

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "scatter", "scatter_async"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "gather", "gather_async"]
__all__ += ["recv", "recv_async", "send", "send_async"]


def broadcast(tensor: Tensor, root: int = 0, name: str | None = None, **scope: Unpack[Scope]) -> Tensor:
    """Returns the root's tensor on every member. All members pass a tensor of its shape and dtype."""
    return _broadcast(tensor, root, name, **scope)


def broadcast_async(
    tensor: Tensor, root: int = 0, name: str | None = None, **scope: Unpack[Scope]
) -> CollectiveWork:
    """Starts `broadcast`."""
    return begin(Collective.BROADCAST, [tensor], name, scope, root=root, then=like([tensor], many=False))


_broadcast = waiting(broadcast_async, tensor_of)


def broadcast_async_(
    tensor: Tensor, root: int = 0, name: str | None = None, **scope: Unpack[Scope]
) -> CollectiveWork:
    """Starts `broadcast`, and writes the result to `tensor` before the work is done."""
    return begin(Collective.BROADCAST, [tensor], name, scope, root=root, then=into(tensor))


broadcast_ = waiting(broadcast_async_, tensor_of)
"""As `broadcast`, but writes the result to `tensor` and returns it."""


def scatter(
    tensors: Sequence[Tensor] | None, root: int = 0, name: str | None = None, **scope: Unpack[Scope]
) -> Tensor:
    """Sends each member one of the root's tensors, in rank order.

    Args:
        tensors: On the root, one tensor per member, of any shapes and dtypes; None on other ranks.
        root: The rank that sends.
        name: The name that calls are matched by.
        **scope: `group`, a group of ranks (None: all), and `communicator`; see `Scope`.

    Returns:
        This rank's tensor; on the CPU if this rank is not the root.
    """
    return tensor_of(scatter_async(tensors, root, name, **scope))


def scatter_async(
    tensors: Sequence[Tensor] | None, root: int = 0, name: str | None = None, **scope: Unpack[Scope]
) -> CollectiveWork:
    """Starts `scatter`."""
    return begin(Collective.SCATTER, tensors or [], name, scope, root=root)


def allgather(tensor: Tensor, name: str | None = None, **scope: Unpack[Scope]) -> Tensor:
    """Concatenates the members' tensors along the first dimension, the only one that may differ.

    A 0-d tensor counts as one row: the result has shape (size,).
    """
    return _allgather(tensor, name, **scope)


def allgather_async(tensor: Tensor, name: str | None = None, **scope: Unpack[Scope]) -> CollectiveWork:
    """Starts `allgather`."""
    return begin(Collective.ALLGATHER, [tensor], name, scope)


_allgather = waiting(allgather_async, tensor_of)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, **scope: Unpack[Scope]
) -> CollectiveWork:
    """Starts `allgather` of each tensor, in one exchange."""
    return begin(Collective.ALLGATHER, tensors, name, scope, then=like(tensors))


grouped_allgather = waiting(grouped_allgather_async, tensors_of)
"""As `allgather` of each tensor, in one exchange."""


def gather(
    tensor: Tensor, root: int = 0, name: str | None = None, **scope: Unpack[Scope]
) -> list[Tensor] | None:
    """Returns the members' tensors in rank order on the root, else None. First dimensions may differ."""
    result: list[Tensor] | None = gather_async(tensor, root, name, **scope).get()
    return result


def gather_async(
    tensor: Tensor, root: int = 0, name: str | None = None, **scope: Unpack[Scope]
) -> CollectiveWork:
    """Starts `gather`."""
    device = tensor.device

    def then(came: Sequence[Tensor]) -> list[Tensor] | None:
        return [one.to(device) for one in came] or None

    return begin(Collective.GATHER, [tensor], name, scope, root=root, then=then)


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    **scope: Unpack[Scope],
) -> tuple[Tensor, Tensor]:
    """Sends each member some of this rank's rows.

    Args:
        tensor: Rows for the first member, then for the second, and so on. The number of rows may
            differ between members; all other dimensions and the dtype must be the same.
        splits: Number of rows for each member; None: the same number for all.
        name: The name that calls are matched by.
        **scope: `group`, a group of ranks (None: all), and `communicator`; see `Scope`.

    Returns:
        The received rows in rank order, and the number of rows from each member (int64).
    """
    output, received = alltoall_async(tensor, splits, name, **scope).get()
    return output, received


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    **scope: Unpack[Scope],
) -> CollectiveWork:
    """Starts `alltoall`."""
    counts = () if splits is None else tuple(map(int, splits))
    device = tensor.device

    def then(came: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        output, received = came
        return output.to(device), received.to(device)

    return begin(Collective.ALLTOALL, [tensor], name, scope, splits=counts, then=then)


def send(
    tensor: Tensor, to: int, name: str | None = None, *, communicator: Communicator | None = None
) -> None:
    """Sends a tensor to one rank. Returns once that rank has called `recv`."""
    send_async(tensor, to, name, communicator=communicator).wait()


def send_async(
    tensor: Tensor, to: int, name: str | None = None, *, communicator: Communicator | None = None
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


# All tensors of a model, of any dtype, in one broadcast.


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
