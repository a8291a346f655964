"""Shared memory: the transport between processes of one user on one Linux host.

A Unix socket carries fixed-size descriptors and headers. A payload never passes through it. A worker's
payload is in a segment of the worker's, which the shard maps once and reads in place. A reply that is
`stable` and in a segment of the shard's is mapped in the worker's window the first time; later replies move
no data. Any other reply is written directly to `into` if that is in a segment, and otherwise gets a segment
of its own. The socket's name is in the abstract namespace, so socket and segments leave nothing on the host.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from hubring.ps.core import huge_pages
from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import ConnectionLost, ServerUnreachable, UsageError
from hubring.ps.security.access import NO_KEY_NEEDED, ShardKey
from hubring.ps.transport.base import MAX_HEADER, Message
from hubring.ps.transport.mapping import Arena, Region, attach, copy, sealed_size
from hubring.ps.transport.shm.listener import ShmListener
from hubring.ps.transport.shm.packet import (
    SCHEME,
    Descriptor,
    Doorbell,
    Introductions,
    Kind,
    Packet,
    peer_user,
    unpack,
)
from hubring.ps.transport.window import Window, Windows

_NOWHERE = Region()


@dataclass(slots=True)
class _Pending:
    """A pending request. Keeps its memory alive until the reply arrives."""

    payload: memoryview | None
    into: memoryview | None
    landing: Region = _NOWHERE
    """The region of `into`."""
    bounce: memoryview | None = None


class _File(NamedTuple):
    """An open segment of the shard's."""

    descriptor: int
    nbytes: int


class ShmConnection:
    """A worker's end of a connection."""

    def __init__(self, arena: Arena, windows: Windows, address: str, timeout: float) -> None:
        self._arena = arena
        self._windows = windows
        self._address = address
        self._tags = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._files: dict[int, _File] = {}
        """The shard's segments by number."""
        self._bounces: defaultdict[int, list[memoryview]] = defaultdict(list)
        connection = _connect(address, timeout)
        self._epoll = select.epoll()
        self.waitable = self._epoll.fileno()
        self._doorbell = Doorbell(connection, self._epoll)
        self._introductions = Introductions(arena, self._doorbell)

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if len(message.header) > MAX_HEADER:
            raise UsageError(
                f"a header of {len(message.header)} bytes is too large; the maximum is {MAX_HEADER}"
            )
        tag = next(self._tags)
        pending = self._pending[tag] = _Pending(message.payload, into)
        payload = self._payload_region(pending)
        pending.landing = self._introductions.region(into)
        kind = Kind.WINDOWED if self._windows.fit(pending.landing) else Kind.REQUEST
        self._doorbell.send(Packet(Descriptor(kind, tag, payload, pending.landing).pack(message.header)))

    def _payload_region(self, pending: _Pending) -> Region:
        """Returns the region from which the shard reads the payload.

        Copies a payload that is outside the arena or in a mapped window.
        """
        payload = pending.payload
        if payload is None or not payload.nbytes:
            return Region()
        region = self._introductions.region(payload)
        if not region.length or self._windows.overlap(region):
            pending.bounce = self._bounce_buffer(payload.nbytes)
            copy(payload, pending.bounce)
            region = self._introductions.region(pending.bounce[: payload.nbytes])
        return region

    def _bounce_buffer(self, nbytes: int) -> memoryview:
        """Returns free memory for a copy. Sizes are powers of two, so that it can be reused."""
        room = 1 << (nbytes - 1).bit_length()
        free = self._bounces[room]
        return free.pop() if free else self._arena.allocate(room)

    def flush(self) -> None:
        try:
            self._doorbell.flush()
        except OSError as error:
            raise self._loss(error) from error

    def receive(self) -> list[Message]:
        messages: list[Message] = []
        try:
            for packet in self._doorbell.receive():  # one train; the poller reports further ones
                if (message := self._take(packet)) is not None:
                    messages.append(message)
            if self._doorbell.full:
                self._doorbell.on_room()
        except (EOFError, OSError, ValueError) as error:
            self._doorbell.hang_up()  # so that the next call also raises
            if not messages:
                raise self._loss(error) from error
        return messages

    def _take(self, packet: Packet) -> Message | None:
        """Returns the reply in a packet; None if the packet is about a segment."""
        enclosed = None
        if packet.descriptor is None:
            descriptor, header = unpack(packet.data)
        else:
            try:
                descriptor, header = unpack(packet.data)
                if descriptor.kind == Kind.SEGMENT:
                    file = _File(packet.descriptor, sealed_size(packet.descriptor))
                    self._forget(descriptor.tag)
                    self._files[descriptor.tag] = file
                    return None
            except BaseException:
                os.close(packet.descriptor)
                raise
            enclosed = attach(packet.descriptor)
        if descriptor.kind == Kind.FORGET:
            self._forget(descriptor.tag)
            return None
        pending = self._pending.pop(descriptor.tag, None)
        if pending is None:
            raise ValueError(f"a reply to request {descriptor.tag}, which is not pending")
        if pending.bounce is not None:
            self._bounces[pending.bounce.nbytes].append(pending.bounce)
        if descriptor.kind == Kind.ENCLOSED:
            return Message(header, enclosed)
        return self._landed(header, descriptor, pending)

    def _forget(self, number: int) -> None:
        file = self._files.pop(number, None)
        if file is not None:
            os.close(file.descriptor)

    def _landed(self, header: bytes, descriptor: Descriptor, pending: _Pending) -> Message:
        """Returns a reply whose payload landed, or is mapped, where the request wanted it."""
        region = descriptor.payload
        if not region.length:
            return Message(header)
        if pending.into is None or region.length > pending.into.nbytes:
            raise ValueError(f"a reply of {region.length} bytes does not fit the requester's memory")
        if descriptor.kind == Kind.SHOWN:
            file = self._files.get(region.segment)
            if file is None or region.offset + region.length > file.nbytes:
                raise ValueError(f"{region} is not in a received segment")
            self._windows.show(pending.landing, self, file.descriptor, region)
        else:
            self._windows.own(pending.landing)
        return Message(header, pending.into[: region.length], landed=True)

    def _loss(self, cause: Exception) -> ConnectionLost:
        return ConnectionLost(f"{self._address}: connection lost ({cause})")

    def close(self) -> None:
        if not self._epoll.closed:
            self._windows.keep(self)
            self._doorbell.close()
            self._epoll.close()
            for file in self._files.values():
                os.close(file.descriptor)


def _connect(address: str, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout)
        connection.connect("\0" + address.removeprefix(SCHEME))
        if peer_user(connection) != os.getuid():
            raise PermissionError(f"the listener's user is {peer_user(connection)}, expected {os.getuid()}")
    except OSError as error:
        connection.close()
        raise ServerUnreachable(f"no process on this host listens at {address} ({error})") from error
    return connection


class ShmTransport:
    """The segments of one process, and the connections that use them.

    Args:
        guarded: Whether peers may only read this process's segments. True for a shard, where no replies land.
        rejections: Counts what a listener refuses.
    """

    name = "shm"

    def __init__(self, *, guarded: bool = False, rejections: Rejections | None = None) -> None:
        self._rejections = rejections or Rejections()
        self._serves = guarded
        self._arena = Arena(guarded=guarded)
        self._windows = Windows(self._arena)

    def listen(self, place: str) -> ShmListener:
        return ShmListener(self._arena, self._rejections)

    def dial(self, address: str, timeout: float, key: ShardKey = NO_KEY_NEEDED) -> ShmConnection:
        # The socket checks that both ends have one user.
        return ShmConnection(self._arena, self._windows, address, timeout)

    def allocate(self, nbytes: int) -> memoryview:
        memory = self._arena.allocate(nbytes)
        if self._serves:  # a shard must answer workers meanwhile; the memory can be used at once
            threading.Thread(
                target=huge_pages.populate, args=(memory,), name="huge pages", daemon=True
            ).start()
        else:
            huge_pages.populate(memory)
        return memory

    def window(self, nbytes: int) -> Window:
        return self._windows.allocate(nbytes, populate=False)
