"""Collectives for scripts: every rank takes part, and each gets the result.

Ranks are matched by name, and the calls under one name in the order in which
each rank makes them. Without a name it is the operation's: ranks must then make
the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps.errors import UsageError
from ps.messages import Collective, ReduceOp
from workers import context
from workers.communicator import CollectiveWork, Communicator


def allreduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    *,
    communicator: Communicator | None = None,
) -> torch.Tensor:
    """Reduces the ranks' tensors, of one shape and dtype, to one.

    Args:
        tensor: This rank's part; only read. Any shape, 0-d too.
        op: How parts become one; AVERAGE wants a floating dtype.
        name: What ranks are matched by.
        communicator: None takes that of `workers.init()`.

    Returns:
        A new tensor of the same shape, dtype and device, equal on all ranks.

    Raises:
        ConfigError: Ranks disagree; says who gave what.
        DeadlineExceeded: Some rank did not take part in time.
        HubringError: What the exchange failed with.
    """
    result = _run(Collective.ALLREDUCE, tensor, name, communicator, op=op)
    return result.reshape(tensor.shape).to(tensor.device)


def broadcast(
    tensor: torch.Tensor, root: int = 0, name: str | None = None, *, communicator: Communicator | None = None
) -> torch.Tensor:
    """Gives every rank the root's tensor; all pass one of its shape and dtype. Raises as `allreduce`."""
    result = _run(Collective.BROADCAST, tensor, name, communicator, root=root)
    return result.reshape(tensor.shape).to(tensor.device)


def allgather(
    tensor: torch.Tensor, name: str | None = None, *, communicator: Communicator | None = None
) -> torch.Tensor:
    """Joins the ranks' tensors along the first dimension, which alone may vary; raises as `allreduce`.

    A 0-d tensor counts as one row: the result has shape (size,).
    """
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return _run(Collective.ALLGATHER, rows, name, communicator).to(tensor.device)


def barrier(name: str | None = None, *, communicator: Communicator | None = None) -> None:
    """Returns once every rank has called it, its last step's exchange over; raises as `allreduce`."""
    if communicator is None:
        context.current().synchronize()
        communicator = context.current().communicator
    work = _start(Collective.BARRIER, None, name, communicator)
    with communicator.waiting:
        work.wait(communicator.timeout)


def broadcast_into(
    tensors: Sequence[torch.Tensor], communicator: Communicator, name: str, timeout: float | None
) -> None:
    """Overwrites tensors of any dtype with rank 0's, in one broadcast of their bytes."""
    if communicator.size == 1 or not tensors:
        return
    whole = torch.cat([_as_bytes(tensor).cpu() for tensor in tensors])
    work = communicator.collective(Collective.BROADCAST, whole, name=name)
    with communicator.waiting:
        work.wait(timeout)
    assert work.result is not None
    start = 0
    for tensor in tensors:
        piece = work.result[start : start + tensor.nbytes]
        # A fresh copy: bytes in the middle of a tensor may be unaligned for a wider dtype.
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _run(
    collective: Collective,
    tensor: torch.Tensor,
    name: str | None,
    communicator: Communicator | None,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    root: int = 0,
) -> torch.Tensor:
    communicator = communicator or context.current().communicator
    work = _start(collective, tensor.detach(), name, communicator, op=op, root=root)
    with communicator.waiting:
        work.wait(communicator.timeout)
    assert work.result is not None, f"{collective.name} gave nothing"
    return work.result


def _start(
    collective: Collective,
    tensor: torch.Tensor | None,
    name: str | None,
    communicator: Communicator,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    root: int = 0,
) -> CollectiveWork:
    if not 0 <= root < communicator.size:
        raise UsageError(f"root is {root}; ranks are 0 to {communicator.size - 1}")
    return communicator.collective(collective, tensor, name=name or collective.name.lower(), op=op, root=root)
