"""A ring's process group on several hosts with several members, with the operations that `Ring` uses.

The members of a host exchange through its memory, and the first of them over Gloo with the first members of
the other hosts. So a host's link carries a tensor once, whatever the number of the host's members.

Law of sums: a host's members are added in memory, then the hosts. The order of additions follows from ranks
and sizes alone, and each element's sum is made once and copied, so a rerun and all ranks have the same bits.

Law of failures: an operation that fails on one member fails on all. The members of its host learn it from the
memory's sockets; then their first member cuts its Gloo connections, which the other hosts notice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hubring.ps.core.errors import HubringError
from hubring.workers.communicators.ring.group import (
    GroupConnections,
    RingStore,
    connecting,
    gist,
    open_gloo,
)
from hubring.workers.communicators.ring.host_group import HostGroup, HostHandle, open_host_group

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""Bytes that are reduced on the host while Gloo exchanges the bytes before them."""

CUT_SECONDS = timedelta(seconds=10)
"""How long Gloo's operations may take to notice that their connections are cut."""


class TwoLevels:
    """The process group.

    Args:
        rank: This member's rank.
        hosts: The members of each host, by rank; hosts in the order of their first member.
        on_host: Connects the members of this host.

    Attributes:
        counts: As `hosts`, `exchangers` and `received` of `Ring`.
    """

    def __init__(self, rank: int, hosts: Sequence[Sequence[int]], on_host: HostGroup) -> None:
        self._hosts = hosts
        self._members = next(members for members in hosts if rank in members)
        self._first = rank == self._members[0]
        elsewhere = sum(map(len, hosts)) - len(self._members)
        self.counts = (len(hosts), len(hosts), elsewhere) if self._first else (len(hosts), 1, 0)
        self._on_host = on_host
        self._across: Any = None
        self._connections: GroupConnections | None = None
        self._sent: deque[Any] = deque()
        """What Gloo has begun to sum."""

    def connect(self, store: RingStore, address: str, seconds: float) -> None:
        """Connects the first member of each host to the others."""
        if self._first:
            self._store, self._connections = store, GroupConnections(address)
            place = self._hosts.index(self._members), len(self._hosts)
            self._across = open_gloo(*place, store, address, seconds, self._connections)
        self.allreduce([torch.zeros(1, dtype=torch.float32, device="cpu")]).wait()  # all have come to here

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long an operation of one level may take."""
        self._on_host.set_timeout(timeout)
        if self._across is not None:
            self._across.set_timeout(timeout)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> HostHandle:
        return self._handle(partial(self._reduce, tensors[0], options or dist.AllreduceOptions()))

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> HostHandle:
        return self._handle(partial(self._broadcast, tensors[0], options.rootRank))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> HostHandle:
        return self._handle(partial(self._gather, inputs[0], outputs[0]))

    def fail(self, reason: str) -> None:
        """Ends all operations on all members, also from another thread."""
        self._on_host.fail(reason)
        if self._connections is not None:
            self._connections.cut()

    def close(self, reason: str) -> None:
        """As `fail`, and closes the connections. Those of Gloo end with this object."""
        self.fail(reason)
        self._on_host.close(reason)

    def _handle(self, operation: Callable[[], None]) -> HostHandle:
        def run() -> None:
            try:
                operation()
            except Exception as cause:
                self.fail(gist(cause))
                for work in self._sent:  # it writes to memory until it ends
                    with suppress(RuntimeError):
                        work.wait(CUT_SECONDS)
                raise

        return HostHandle(run)

    def _reduce(self, tensor: Tensor, options: Any) -> None:
        pieces = torch.split(tensor, PIECE_BYTES // tensor.itemsize)
        for number, piece in enumerate(pieces):
            self._on_host.allreduce([piece], options).wait()
            if self._across is not None:
                self._sent.append(self._across.allreduce([piece], options))
            if number:
                self._return(pieces[number - 1])
        self._return(pieces[-1])

    def _return(self, piece: Tensor) -> None:
        """Gives the host's members the sum of all hosts."""
        if self._across is not None:
            self._sent.popleft().wait()
        self._on_host.broadcast([piece], _root(0)).wait()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        home = next(members for members in self._hosts if root in members)
        if home is self._members:
            self._on_host.broadcast([tensor], _root(home.index(root))).wait()
        self._spread(tensor, home)

    def _gather(self, own: Tensor, into: Sequence[Tensor]) -> None:
        for members in self._hosts:
            block = own.new_empty(len(members) * own.numel())
            parts = torch.split(block, own.numel())
            if members is self._members:
                self._on_host.allgather([parts], [own]).wait()
            self._spread(block, members)
            for member, part in zip(members, parts, strict=True):
                into[member].copy_(part)

    def _spread(self, tensor: Tensor, home: Sequence[int]) -> None:
        """Gives the other hosts what a host's members have."""
        if self._across is not None:
            self._across.broadcast([tensor], _root(self._hosts.index(home))).wait()
        if home is not self._members:
            self._on_host.broadcast([tensor], _root(0)).wait()


def _root(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def open_two_levels(
    rank: int, size: int, store: RingStore, host: str, address: str, seconds: float
) -> TwoLevels | None:
    """Opens the process group. Every member calls it.

    Args:
        rank: This member's rank.
        size: Number of members.
        store: The store through which they find each other.
        host: Names this member's host (`hubring.ps.transport.host.host_id`).
        address: This member's address for the others.
        seconds: How long another member may take for one step.

    Returns:
        None on all members if one level is as good, or the members of some host cannot share memory.

    Raises:
        RingBroken: A member is lost, or did not come.
    """
    with connecting(rank, size, seconds):
        places = store.gather("host", rank, host.encode(), size)
    hosts = [[one for one in range(size) if places[one] == place] for place in dict.fromkeys(places)]
    if len(hosts) in (1, size):
        return None
    members = next(one for one in hosts if rank in one)
    on_host = open_host_group(rank, size, store.within(f"host{members[0]}"), seconds, members)
    with connecting(rank, size, seconds):
        together = store.gather("together", rank, b"n" if on_host is None else b"y", size)
    if on_host is None or b"n" in together:
        if on_host is not None:
            on_host.close("the ring uses one level")
        apart = [members for members in hosts if together[members[0]] == b"n"]
        if rank == 0:
            log.warning("--local has no effect: ranks %s cannot share memory", apart)
        return None
    group = TwoLevels(rank, hosts, on_host)
    on_host.set_timeout(timedelta(seconds=seconds))
    across = store.within("across")
    try:
        with connecting(rank, size, seconds):
            group.connect(across, address, seconds)
    except HubringError as error:
        group.fail(str(error))  # or the host's other members would wait
        raise
    if rank == 0:  # all have connected, so all have read what they need
        across.forget()
        store.forget()
    return group
