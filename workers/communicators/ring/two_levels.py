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
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hubring.ps.core.errors import RingBroken
from hubring.ps.core.torch_internals import gloo_group
from hubring.workers.communicators.ring.group import GroupConnections, RingStore, connecting, gist
from hubring.workers.communicators.ring.host_group import HostGroup, HostHandle, open_host_group

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 22
"""Bytes that are reduced on the host while Gloo exchanges the bytes before them."""

LONGER_SECONDS = 2.0
"""How much longer members of a host wait for each other than for other hosts."""
CUT_SECONDS = 10.0
"""How long the thread may take to end once connections are cut."""


class TwoLevels:
    """The process group.

    A thread reduces on the host what has been started, one operation after the other, and sends the sums
    over Gloo. The thread that waits for an operation sends its results to the host's members. Each thread
    has memory of its own for this, so Gloo always has something to send.

    Args:
        rank: This member's rank.
        hosts: The members of each host, by rank; hosts in the order of their first member.
        up: Connects the members of this host, for what goes to the first of them.
        down: Connects them too, for results.

    Attributes:
        counts: As `hosts`, `exchangers` and `received` of `Ring`.
    """

    def __init__(self, rank: int, hosts: Sequence[Sequence[int]], up: HostGroup, down: HostGroup) -> None:
        self._hosts = hosts
        self._members = next(members for members in hosts if rank in members)
        self._first = rank == self._members[0]
        elsewhere = sum(map(len, hosts)) - len(self._members)
        self.counts = (len(hosts), len(hosts), elsewhere) if self._first else (len(hosts), 1, 0)
        self._up, self._down = up, down
        self._across: Any = None
        self._connections: GroupConnections | None = None
        self._begun: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._sent: SimpleQueue[Any] = SimpleQueue()
        """For each piece of an operation in turn: Gloo's operation, None if there is none, or an error."""
        self._thread = threading.Thread(target=self._send_all, name="ring on two levels", daemon=True)
        self._thread.start()

    def connect(self, store: RingStore, address: str, seconds: float) -> None:
        """Connects the first member of each host to the others."""
        self.set_timeout(timedelta(seconds=seconds))
        if self._first:
            self._store, self._connections = store, GroupConnections(address)
            self._connections.introduce(store, self._members[0], [members[0] for members in self._hosts])
            place = self._hosts.index(self._members), len(self._hosts)
            self._across = gloo_group(store, *place, self._connections.device, seconds)
        self.allreduce([torch.zeros(1, dtype=torch.float32, device="cpu")]).wait()  # all have come to here

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long an operation of one level may take."""
        # If another host is late, this one's first member waits for it, and must not be named in its place.
        for level in (self._up, self._down):
            level.set_timeout(timeout + timedelta(seconds=LONGER_SECONDS))
        if self._across is not None:
            self._across.set_timeout(timeout)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> HostHandle:
        pieces = torch.split(tensors[0], PIECE_BYTES // tensors[0].itemsize)
        options = options or dist.AllreduceOptions()
        return self._begin(partial(self._reduce, pieces, options), partial(self._return, pieces))

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> HostHandle:
        return self._begin(partial(self._broadcast, tensors[0], options.rootRank), self._await_piece)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> HostHandle:
        return self._begin(partial(self._gather, inputs[0], outputs[0]), self._await_piece)

    def fail(self, reason: str) -> None:
        """Ends all operations on all members, also from another thread."""
        self._up.fail(reason)
        self._down.fail(reason)
        if self._connections is not None:
            self._connections.cut()

    def close(self, reason: str) -> None:
        """As `fail`, and ends the thread. Gloo's connections end with this object."""
        self.fail(reason)
        self._begun.put(None)
        self._thread.join(CUT_SECONDS)
        self._up.close(reason)
        self._down.close(reason)

    def _begin(self, send: Callable[[], None], end: Callable[[], None]) -> HostHandle:
        """Begins an operation in the thread; the handle ends it."""

        def wait() -> None:
            try:
                end()
            except Exception as cause:
                self.fail(gist(cause))
                raise

        self._begun.put(send)
        return HostHandle(wait)

    def _send_all(self) -> None:
        torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
        while (send := self._begun.get()) is not None:
            try:
                send()
            except Exception as error:  # any error: a caller waits for this operation
                self.fail(gist(error))
                self._sent.put(error)
        self._sent.put(RingBroken("this worker has left the ring"))
        # Gloo writes to memory until it ends, and must not be destroyed before: the thread keeps this object.
        while not isinstance(sent := self._sent.get(), Exception):
            if sent is not None:
                with suppress(RuntimeError):
                    sent.wait()
        self._sent.put(sent)

    def _await_piece(self) -> None:
        sent = self._sent.get()
        if isinstance(sent, Exception):
            self._sent.put(sent)  # for the operations after this one
            raise sent
        if sent is not None:
            sent.wait()

    def _reduce(self, pieces: Sequence[Tensor], options: Any) -> None:
        for piece in pieces:
            self._up.allreduce([piece], options).wait()
            across = self._across
            self._sent.put(None if across is None else across.allreduce([piece], options))

    def _return(self, pieces: Sequence[Tensor]) -> None:
        """Gives the host's members the sums of all hosts."""
        for piece in pieces:
            self._await_piece()
            self._down.broadcast([piece], _root(0)).wait()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        home = next(members for members in self._hosts if root in members)
        if home is self._members:
            self._up.broadcast([tensor], _root(home.index(root))).wait()
        self._spread(tensor, home)
        self._sent.put(None)

    def _gather(self, own: Tensor, into: Sequence[Tensor]) -> None:
        for members in self._hosts:
            block = own.new_empty(len(members) * own.numel())
            parts = torch.split(block, own.numel())
            if members is self._members:
                self._up.allgather([parts], [own]).wait()
            self._spread(block, members)
            for member, part in zip(members, parts, strict=True):
                into[member].copy_(part)
        self._sent.put(None)

    def _spread(self, tensor: Tensor, home: Sequence[int]) -> None:
        """Gives the other hosts what a host's members have."""
        if self._across is not None:
            self._across.broadcast([tensor], _root(self._hosts.index(home))).wait()
        if home is not self._members:
            self._up.broadcast([tensor], _root(0)).wait()


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
        places = store.gather("host", rank, host.encode(), range(size))
        hosts = [[one for one in range(size) if places[one] == place] for place in dict.fromkeys(places)]
        if len(hosts) in (1, size):
            if rank == 0 and store.generation < 2:  # the next ones of a ring that heals would repeat it
                why = "all ranks are on one host" if len(hosts) == 1 else "each rank has a host of its own"
                log.info("--local has no effect: %s", why)
            return None
        members = next(one for one in hosts if rank in one)
        levels = [
            open_host_group(rank, size, store.within(f"{way}{members[0]}"), seconds, members)
            for way in ("up", "down")
        ]
        opened = [level for level in levels if level is not None]
        together = store.gather("together", rank, b"y" if len(opened) == len(levels) else b"n", range(size))
        if b"n" in together:
            for level in opened:
                level.close("the ring uses one level")
            if rank == 0:
                apart = [one for one in range(size) if together[one] == b"n"]
                text = "--local has no effect: on the hosts of ranks %s, workers cannot share memory"
                log.warning(text, apart)
            return None
        group, across = TwoLevels(rank, hosts, *opened), store.within("across")
        try:
            group.connect(across, address, seconds)
        except Exception as error:
            # Or the host's other members would wait.
            group.close(f"rank {rank} could not connect: {gist(error)}")
            raise
        if rank == 0:  # all have connected, so all have read what they need
            across.forget()
            store.forget()
        return group
