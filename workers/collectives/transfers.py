"""From one rank to another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Call, Collective
from hubring.workers.collectives.start import tensor_of
from hubring.workers.communicators.base import CollectiveWork, Communicator
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
    """Sends a tensor to one rank; returns once that one has called `recv`."""
    send_async(tensor, to, name, communicator=communicator).wait()


def send_async(
    tensor: Tensor,
    to: int,
    name: str | None = None,
    *,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `send`."""
    communicator = communicator or context.current().communicator
    return _transfer([tensor], communicator.rank, to, name, communicator)


def recv(source: int, name: str | None = None, *, communicator: Communicator | None = None) -> Tensor:
    """The tensor that one rank sends here under this name, on the CPU; shape and dtype travel along.

    Those under one name come in the order in which they were sent.
    """
    return tensor_of(recv_async(source, name, communicator=communicator))


def recv_async(
    source: int, name: str | None = None, *, communicator: Communicator | None = None
) -> CollectiveWork:
    """Begins `recv`."""
    communicator = communicator or context.current().communicator
    return _transfer([], source, communicator.rank, name, communicator)


def _transfer(
    tensors: Sequence[Tensor], source: int, to: int, name: str | None, communicator: Communicator
) -> CollectiveWork:
    other = to if source == communicator.rank else source
    if other == communicator.rank or not 0 <= other < communicator.size:
        allowed = f"from 0 to {communicator.size - 1}, but not rank {communicator.rank} itself"
        raise UsageError(f"there is no sending between rank {source} and rank {to}; allowed is any {allowed}")
    # Both directions may be under way under one name.
    spelt = f"{name or 'transfer'} from {source} to {to}"
    call = Call(Collective.TRANSFER, spelt, root=source, ranks=tuple(sorted((source, to))))
    return communicator.collective(call, *tensors)
