"""A ring's process group through the memory of one host, with the operations of torch's that `Ring` uses.

An operation runs in the thread that waits for it: for a ring, that of its `Operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hubring.workers.communicators.host import meeting
from hubring.workers.communicators.host.reductions import reduction
from hubring.workers.communicators.host.shared_memory import HostExchange
from hubring.workers.communicators.ring.group import RingStore, connecting


class HostHandle(NamedTuple):
    """An operation that begins when it is waited for."""

    run: Callable[[], None]

    def wait(self, _: timedelta | None = None) -> None:
        """Runs the operation. The group's own timeout holds."""
        self.run()


class HostGroup:
    """The process group.

    Args:
        exchange: Connects the members.
        size: Number of members.
    """

    def __init__(self, exchange: HostExchange, size: int) -> None:
        self._exchange = exchange
        self._size = size
        self.begin_gather, self.end_gather = exchange.begin_gather, exchange.end_gather
        self.fail, self.close = exchange.fail, exchange.close

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long an operation may take."""
        self._exchange.timeout = timeout.total_seconds()

    def allreduce(
        self, tensors: Sequence[Tensor], options: Any = None, given: Tensor | None = None
    ) -> HostHandle:
        """As torch's; `given` is this member's tensor if it is another one than that for the result."""
        (tensor,) = tensors
        op = reduction(ReduceOp.SUM if options is None else options.reduceOp, tensors)
        return HostHandle(lambda: self._exchange.reduce(tensor, op, given))

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> HostHandle:
        return self.allreduce(tensors, options)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> HostHandle:
        (tensor,) = tensors
        data = tensor.view(torch.uint8)
        return HostHandle(lambda: self._exchange.broadcast(data, options.rootRank))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> HostHandle:
        (into,), (own,) = outputs, inputs
        parts = [one.view(torch.uint8) for one in into]
        return HostHandle(lambda: self._exchange.allgather(own.view(torch.uint8), parts))

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any
    ) -> HostHandle:
        (own,) = inputs
        nothing = [own[:0]] * self._size
        sent = [own if member == options.rootRank else own[:0] for member in range(self._size)]
        return self._alltoall(sent, outputs[0] if outputs else nothing)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any
    ) -> HostHandle:
        (own,) = outputs
        nothing = [own[:0]] * self._size
        into = [own if member == options.rootRank else own[:0] for member in range(self._size)]
        return self._alltoall(inputs[0] if inputs else nothing, into)

    def alltoall_base(
        self, output: Tensor, source: Tensor, taken: Sequence[int], given: Sequence[int]
    ) -> HostHandle:
        return self._alltoall(torch.split(source, list(given)), torch.split(output, list(taken)))

    def _alltoall(self, sent: Sequence[Tensor], into: Sequence[Tensor]) -> HostHandle:
        return HostHandle(lambda: self._exchange.alltoall(sent, into))


def open_host_group(
    rank: int, size: int, store: RingStore, seconds: float, members: Sequence[int] = ()
) -> HostGroup | None:
    """Opens the process group if all members are on one host. Every member calls it.

    Args:
        rank: This member's rank in the ring.
        size: Number of ranks in the ring.
        store: The store through which the members find each other.
        seconds: How long another member may take for one step.
        members: The members' ranks in the ring; empty: all.

    Returns:
        None on all members if one is on another host, or belongs to another user.

    Raises:
        RingBroken: A member is lost, or did not come.
    """
    members, rounds = members or range(size), count()

    def gather(own: bytes) -> list[bytes]:
        return store.gather(f"host{next(rounds)}", rank, own, members)

    with connecting(rank, size, seconds):
        exchange = meeting.connect(gather, "the ring", members, members.index(rank), seconds=seconds)
    if exchange is None:
        return None
    if rank == members[0]:  # connected to all, so all have read what they need
        store.forget()
    return HostGroup(exchange, len(members))
