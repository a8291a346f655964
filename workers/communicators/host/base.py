"""How the members of a group exchange tensors.

Members are named by their rank in the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from hubring.workers.communicators.host.reductions import TorchReduction


class GroupExchange(ABC):
    """Connects the members of a group. One operation at a time; all members call the same ones in one order.

    Tensors are flat and in host memory. What only moves is of dtype uint8. An operation raises HubringError
    if a member is lost or calls another operation.
    """

    timeout: float = 1800.0
    """Seconds that the next operation may take."""

    @abstractmethod
    def reduce(self, flat: Tensor, op: TorchReduction) -> None:
        """Replaces the tensor by the reduction of all members' tensors, without its factor."""

    @abstractmethod
    def broadcast(self, data: Tensor, root: int) -> None:
        """Overwrites the bytes with the root's."""

    @abstractmethod
    def allgather(self, own: Tensor, into: Sequence[Tensor]) -> None:
        """Writes each member's bytes to its tensor in `into`."""

    @abstractmethod
    def alltoall(self, sent: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Sends `sent[i]` to member i, and writes what member i sends to `into[i]`. Each can be empty."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Ends the exchange, also from another thread: an operation in flight fails."""
