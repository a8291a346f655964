"""The fast way between members on one host: memory that all of them map, and a socket for each pair.

Each member has memory of three slots, which the others read. In one round every member writes to its slot,
then sends a mark to each other member and waits for theirs. A mark carries up to 64 KB itself, so small
tensors need one wake-up in each direction. A reduction is pipelined: in one round a member copies a chunk in,
reduces its part of the chunk before, and copies the results of the chunk before that out.

Law: slots are used in turn, by all members alike. A member that writes to a slot has the marks of a later
round than the one in which others read it, so none of them still reads it.

A member that fails tells the others why before it closes its sockets. The kernel closes those of a process
that ends. For one that is only silent, a transfer that the hub refuses once it is lost stands open at the
hub.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, HubringError, RingBroken
from hubring.ps.transport import mapping
from hubring.workers.communicators.host.base import GroupExchange
from hubring.workers.communicators.host.marks import FAILED, MARK, SMALL, HostMark, Peer, spell, tensor_over
from hubring.workers.communicators.host.reductions import TorchReduction

SLOT = 1 << 21
"""Bytes of a slot."""
SLOTS = 3
LOOK_SECONDS = 0.25
"""How often a waiting member looks whether it should give up."""


class HostExchange(GroupExchange):
    """Exchanges through memory that all members map.

    Args:
        name: The group's name, for errors.
        own: This member's rank in the group.
        memory: This member's memory.
        peers: The other members, by rank in the group.
        lost: Returns the error if a member that is silent will never answer.
    """

    def __init__(
        self,
        name: str,
        own: int,
        memory: Tensor,
        peers: dict[int, Peer],
        lost: Callable[[], HubringError | None] = lambda: None,
    ) -> None:
        self._name = name
        self._own = own
        self._size = len(peers) + 1
        self._peers = peers
        self._memories = [peers[member].memory if member != own else memory for member in range(self._size)]
        self._lost = lost
        self._number = 0
        self._rounds = 0
        """Slots used so far."""
        self._deadline = 0.0
        self._failure = ""
        self._given = memoryview(b"")
        """What this member gives in the gather that has begun."""
        self._marks: dict[int, HostMark] = {}
        """What has come of it."""
        self._using = threading.Lock()
        """Held by an operation."""

    @property
    def in_use(self) -> bool:
        """Whether an operation is under way."""
        return self._using.locked()

    def reduce(self, flat: Tensor, op: TorchReduction, given: Tensor | None = None) -> None:
        """As `GroupExchange.reduce`; this member's tensor can be another one, which stays as it is."""
        with self._using:
            self._begin()
            if self._size > 1 and flat.nbytes > SMALL:
                self._reduce_large(flat, flat if given is None else given, op)
                return
            if given is not None:
                flat.copy_(given)
            if self._size > 1:
                self._reduce_small(flat, op)

    def _reduce_small(self, flat: Tensor, op: TorchReduction) -> None:
        data = flat.view(torch.uint8)
        marks = self._swap(b"rdce", data.numel(), data, {member: (0, data.numel()) for member in self._peers})
        self._check_sizes(marks, data.numel())
        parts = [
            tensor_over(marks[member].carried, flat.dtype) if member != self._own else flat.clone()
            for member in range(self._size)
        ]
        op.reduce_all(parts, flat)

    def broadcast(self, data: Tensor, root: int) -> None:
        into = [data.new_empty(0) for _ in range(self._size)]
        if root == self._own:
            self._move(b"brdc", data, dict.fromkeys(self._peers, (0, data.numel())), into)
        else:
            into[root] = data
            self._move(b"brdc", data[:0], {}, into)

    def allgather(self, own: Tensor, into: Sequence[Tensor]) -> None:
        into[self._own].copy_(own)
        self._move(b"gthr", own, dict.fromkeys(self._peers, (0, own.numel())), into)

    def alltoall(self, sent: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        into[self._own].copy_(sent[self._own])
        ranges, parts, start = {}, [], 0
        for member in self._peers:
            stop = start + sent[member].numel()
            ranges[member] = start, stop
            parts.append(sent[member])
            start = stop
        self._move(b"a2a ", torch.cat(parts) if parts else sent[self._own][:0], ranges, into)

    def begin_gather(self, data: memoryview) -> None:
        """Begins to give each member these bytes; others may have more or fewer. Then call `end_gather`.

        This member never waits here, if the bytes are at most `SMALL`.
        """
        with self._using:
            self._begin()
            self._given = data
            self._marks = {}
            self._tell_all(b"each", len(data), data, dict.fromkeys(self._peers, (0, len(data))))

    def end_gather(self, until: float = math.inf) -> list[memoryview] | None:
        """Returns the bytes of each member, which are valid until the next operation.

        Args:
            until: By `time.monotonic`. If a member has not come by then, returns None: call it again, from
                any thread.
        """
        with self._using:
            try:
                for member, peer in self._peers.items():
                    if member not in self._marks:
                        self._marks[member] = self._receive(peer, b"each", until)
            except TimeoutError:
                return None
            given, marks = self._given, self._marks
            came = [given if member == self._own else marks[member].carried for member in range(self._size)]
            large = {member: mark.total for member, mark in marks.items() if mark.total > SMALL}
            if large or len(given) > SMALL:
                sizes = [large.get(member, 0) for member in range(self._size)]
                into = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in sizes]
                self._move_large(tensor_over(given), marks, into)
                for member in large:
                    came[member] = into[member].numpy().data
            return came

    def await_end(self) -> None:
        """Waits until the exchange has ended on a member."""
        ends = select.poll()
        for peer in self._peers.values():
            ends.register(peer.socket, 0)  # a closed connection is always reported
        ends.poll()

    def fail(self, reason: str) -> None:
        """Ends all operations on all members, also from another thread."""
        if not self._failure:
            self._fail(RingBroken(reason))

    def close(self, reason: str) -> None:
        self.fail(reason)
        with self._using:  # an operation in another thread has failed by now
            for peer in self._peers.values():
                peer.socket.close()

    def _begin(self) -> None:
        if self._failure:
            raise RingBroken(self._failure)
        self._deadline = time.monotonic() + self.timeout
        self._number += 1

    def _reduce_large(self, flat: Tensor, given: Tensor, op: TorchReduction) -> None:
        step, nbytes = SLOT // flat.itemsize, flat.nbytes
        chunks = torch.split(flat, step)
        inputs = chunks if given is flat else torch.split(given, step)
        first = self._rounds
        self._rounds += len(chunks)
        for number in range(len(chunks) + 2):
            if number >= 2:
                self._copy_out(chunks[number - 2], first + number - 2)
            if 1 <= number <= len(chunks):
                self._reduce_part(chunks[number - 1], inputs[number - 1], first + number - 1, op)
            if number < len(chunks):
                self._copy_in(inputs[number], first + number)
            if number <= len(chunks):
                marks = self._swap(b"RDCE", nbytes, None, {})
                if number == 0:
                    self._check_sizes(marks, nbytes)

    def _copy_in(self, chunk: Tensor, number: int) -> None:
        """Copies what other members reduce."""
        slot, own = self._slot(self._own, number, chunk), self._part(self._own, chunk)
        for part in (slice(own.start), slice(own.stop, None)):
            slot[part].copy_(chunk[part])

    def _reduce_part(self, chunk: Tensor, given: Tensor, number: int, op: TorchReduction) -> None:
        """Reduces this member's part of a chunk, and copies the result to its slot."""
        part = self._part(self._own, chunk)
        slots = [self._slot(member, number, chunk)[part] for member in range(self._size)]
        if given is not chunk:
            chunk[part].copy_(given[part])
        op.reduce(chunk[part], slots[self._own + 1 :] + slots[: self._own])
        slots[self._own].copy_(chunk[part])

    def _copy_out(self, chunk: Tensor, number: int) -> None:
        for member in self._peers:
            part = self._part(member, chunk)
            chunk[part].copy_(self._slot(member, number, chunk)[part])

    def _part(self, member: int, chunk: Tensor) -> slice:
        """Returns which elements of a chunk a member reduces: whole cache lines."""
        line = mapping.ALIGNMENT // chunk.itemsize
        lines = -(-chunk.numel() // line)
        start, stop = (lines * each // self._size * line for each in (member, member + 1))
        return slice(start, min(stop, chunk.numel()))

    def _slot(self, member: int, number: int, like: Tensor) -> Tensor:
        """Returns a member's slot in a round, as elements like those of a tensor."""
        start = number % SLOTS * SLOT
        return self._memories[member][start : start + like.numel() * like.itemsize].view(like.dtype)

    def _move(
        self, what: bytes, data: Tensor, ranges: dict[int, tuple[int, int]], into: Sequence[Tensor]
    ) -> None:
        """Offers each other member a part of some bytes, and writes what they offer."""
        if self._size == 1:
            return
        with self._using:
            self._begin()
            self._move_begun(what, data, ranges, into)

    def _move_begun(
        self, what: bytes, data: Tensor, ranges: dict[int, tuple[int, int]], into: Sequence[Tensor]
    ) -> None:
        marks = self._swap(what, data.numel(), data, ranges)
        for member, mark in marks.items():
            if mark.stop - mark.start != into[member].numel():
                raise self._fail(
                    ConfigError(
                        f"{self._peers[member].name} sent {mark.stop - mark.start} bytes, expected"
                        f" {into[member].numel()}: pass tensors of equal sizes on all ranks, or"
                        " the sizes that the other ranks send"
                    )
                )
            if mark.total <= SMALL:
                into[member].copy_(tensor_over(mark.carried))
        self._move_large(data, marks, into)

    def _move_large(self, data: Tensor, marks: dict[int, HostMark], into: Sequence[Tensor]) -> None:
        """Moves what marks do not carry."""
        large = [total for total in (data.numel(), *(mark.total for mark in marks.values())) if total > SMALL]
        for begin in range(0, max(large, default=0), SLOT):
            self._move_slot(begin, data, marks, into)

    def _move_slot(
        self, begin: int, data: Tensor, marks: dict[int, HostMark], into: Sequence[Tensor]
    ) -> None:
        slot = self._rounds % SLOTS * SLOT
        self._rounds += 1
        if data.numel() > SMALL and data.numel() > begin:
            piece = data[begin : begin + SLOT]
            self._memories[self._own][slot : slot + piece.numel()].copy_(piece)
        self._swap(b"slot", begin, None, {})
        for member, mark in marks.items():
            start, stop = max(begin, mark.start), min(begin + SLOT, mark.stop)
            if mark.total > SMALL and start < stop:
                there = self._memories[member][slot + start - begin : slot + stop - begin]
                into[member][start - mark.start : stop - mark.start].copy_(there)

    def _swap(
        self, what: bytes, total: int, data: Tensor | None, ranges: dict[int, tuple[int, int]]
    ) -> dict[int, HostMark]:
        """Sends a mark to each other member, and returns theirs."""
        self._tell_all(what, total, None if data is None else data.numpy().data, ranges)
        return {member: self._receive(peer, what) for member, peer in self._peers.items()}

    def _tell_all(
        self, what: bytes, total: int, data: memoryview | None, ranges: dict[int, tuple[int, int]]
    ) -> None:
        carried = data if data is not None and 0 < total <= SMALL else None
        for member, peer in self._peers.items():
            start, stop = ranges.get(member, (0, 0))
            head = MARK.pack(what, self._number, total, start, stop)
            self._send(peer, [head, carried[start:stop]] if carried is not None else [head])

    def _send(self, peer: Peer, parts: Sequence[bytes | memoryview]) -> None:
        while True:
            try:
                peer.socket.sendmsg(parts)
            except BlockingIOError:
                self._look(peer)
            except OSError:
                while True:  # until its last mark, which may tell why it failed, or its end
                    self._receive(peer, b"")
            else:
                return

    def _receive(self, peer: Peer, what: bytes, until: float = math.inf) -> HostMark:
        while True:
            try:
                length = peer.socket.recv_into(peer.received)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise TimeoutError from error
                self._look(peer)
            except ConnectionResetError:
                continue  # the peer ended with marks unread; its own are still there
            except OSError as error:
                raise self._fail(self._gone(peer)) from error
        if not length:
            raise self._fail(self._gone(peer))
        kind, number, total, start, stop = MARK.unpack_from(peer.received)
        if kind == FAILED:
            raise self._fail(RingBroken(bytes(peer.received[MARK.size : length]).decode(errors="replace")))
        if what and (kind, number) != (what, self._number):
            raise self._fail(
                ConfigError(
                    f"ranks disagree in operation {self._number} of {self._name}: this rank is in"
                    f" {spell(what)}, {peer.name} in {spell(kind)} (operation {number}). All ranks must"
                    " make the same calls in the same order, with tensors of equal sizes"
                )
            )
        return HostMark(total, start, stop, memoryview(peer.received)[MARK.size : length])

    def _check_sizes(self, marks: dict[int, HostMark], nbytes: int) -> None:
        for member, mark in marks.items():
            if mark.total != nbytes:
                raise self._fail(
                    ConfigError(
                        f"ranks disagree: this rank reduces {nbytes} bytes, {self._peers[member].name}"
                        f" {mark.total}: pass tensors of one shape and dtype on all ranks"
                    )
                )

    def _look(self, peer: Peer) -> None:
        """Raises an error if a silent member is lost, or was waited for too long."""
        if self._failure:
            raise RingBroken(self._failure)
        if time.monotonic() > self._deadline:
            raise self._fail(DeadlineExceeded(f"Timed out waiting for {peer.name} after {self.timeout:g} s"))
        if (error := self._lost()) is not None:
            raise self._fail(error)

    def _gone(self, peer: Peer) -> HubringError:
        text = f"{peer.name} is lost: its process ended, or it left {self._name}. Restart the job"
        return RingBroken(self._failure or text)

    def _fail(self, error: HubringError) -> HubringError:
        """Tells the other members, and ends the exchange. Returns the error."""
        if not self._failure:
            self._failure = str(error)
            text = MARK.pack(FAILED, self._number, 0, 0, 0) + self._failure.encode()[:SMALL]
            for peer in self._peers.values():
                with suppress(OSError):
                    peer.socket.sendmsg([text], (), socket.MSG_DONTWAIT)
                with suppress(OSError):
                    peer.socket.shutdown(socket.SHUT_RDWR)
        return error
