"""Send and receive between two ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hubring.ps.core.errors import UsageError
from hubring.workers.collectives.start import tensor_of
from hubring.workers.communicators.base import CollectiveWork, Communicator
from hubring.workers.communicators.transfer_call import transfer_call
from hubring.workers.runtime import context

__all__ = [
    "recv",
    "recv_async",
    "send",
    "send_async",
]


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
