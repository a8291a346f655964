"""A worker's end of the shared memory wire: sends requests, and finds each reply where it landed."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hubring.ps.core.errors import ConnectionLost, ServerUnreachable, UsageError
from hubring.ps.transport.base import MAX_HEADER, Message
from hubring.ps.transport.memory import copy
from hubring.ps.transport.shm.doorbell import Doorbell, Packet, peer_user
from hubring.ps.transport.shm.packet import Descriptor, Introductions, Kind, unpack
from hubring.ps.transport.shm.segment import Arena, Region, attach, sealed_size
from hubring.ps.transport.shm.window import Windows

SCHEME = "shm://"
"""What the address of a shard's listener begins with."""

_NOWHERE = Region()


@dataclass(slots=True)
class _Pending:
    """A request under way: keeps its memory alive until the reply is there."""

    payload: memoryview | None
    into: memoryview | None
    landing: Region = _NOWHERE
    """Where `into` lies."""
    bounce: memoryview | None = None


class _File(NamedTuple):
    """A segment of the shard's, open."""

    descriptor: int
    nbytes: int


class ShmConnection:
    """A worker's end."""

    def __init__(self, arena: Arena, windows: Windows, address: str, timeout: float) -> None:
        self._arena = arena
        self._windows = windows
        self._address = address
        self._tags = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._files: dict[int, _File] = {}
        """The shard's segments by their numbers."""
        self._bounces: defaultdict[int, list[memoryview]] = defaultdict(list)
        line = _connect(address, timeout)
        self._epoll = select.epoll()
        self._waitable = self._epoll.fileno()
        self._doorbell = Doorbell(line, self._epoll)
        self._introductions = Introductions(arena, self._doorbell)

    @property
    def waitable(self) -> int:
        return self._waitable

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if len(message.header) > MAX_HEADER:
            raise UsageError(f"a header of {len(message.header)} bytes; at most {MAX_HEADER} can be sent")
        tag = next(self._tags)
        pending = self._pending[tag] = _Pending(message.payload, into)
        payload = self._payload_region(pending)
        pending.landing = self._introductions.region(into)
        kind = Kind.WINDOWED if self._windows.fit(pending.landing) else Kind.REQUEST
        self._doorbell.send(Packet(Descriptor(kind, tag, payload, pending.landing).pack(message.header)))

    def _payload_region(self, pending: _Pending) -> Region:
        """Where the shard finds the payload; one from elsewhere, or shown to us, is copied there first."""
        payload = pending.payload
        if payload is None or not payload.nbytes:
            return Region()
        region = self._introductions.region(payload)
        if not region.length or self._windows.overlap(region):
            pending.bounce = self._borrow(payload.nbytes)
            copy(payload, pending.bounce)
            region = self._introductions.region(pending.bounce[: payload.nbytes])
        return region

    def _borrow(self, nbytes: int) -> memoryview:
        """Memory of ours that no request uses; powers of two, so that it is soon of use again."""
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
            for packet in self._doorbell.receive():  # one train; where there are more, we are called again
                messages.extend(self._take(packet))
            self._doorbell.on_room()
        except (EOFError, OSError, ValueError) as error:
            self._doorbell.hang_up()  # so that the next call finds the end too
            if not messages:
                raise self._loss(error) from error
        return messages

    def _take(self, packet: Packet) -> list[Message]:
        with _closed_on_error(packet.descriptor):
            descriptor, header = unpack(packet.data)
            if descriptor.kind == Kind.SEGMENT and packet.descriptor is not None:
                file = _File(packet.descriptor, sealed_size(packet.descriptor))
                self._forget(descriptor.tag)
                self._files[descriptor.tag] = file
                return []
        enclosed = None if packet.descriptor is None else attach(packet.descriptor)
        if descriptor.kind == Kind.FORGET:
            self._forget(descriptor.tag)
            return []
        pending = self._pending.pop(descriptor.tag, None)
        if pending is None:
            raise ValueError(f"a reply to request {descriptor.tag}, which was never sent")
        if pending.bounce is not None:
            self._bounces[pending.bounce.nbytes].append(pending.bounce)
        if descriptor.kind == Kind.ENCLOSED:
            return [Message(header, enclosed)]
        return [self._landed(header, descriptor, pending)]

    def _forget(self, number: int) -> None:
        file = self._files.pop(number, None)
        if file is not None:
            os.close(file.descriptor)

    def _landed(self, header: bytes, descriptor: Descriptor, pending: _Pending) -> Message:
        """A reply whose payload is where it was wanted, or is shown there."""
        region = descriptor.payload
        if not region.length:
            return Message(header)
        if pending.into is None or region.length > pending.into.nbytes:
            raise ValueError(f"a reply of {region.length} bytes landed where there was no room for it")
        if descriptor.kind == Kind.SHOWN:
            file = self._files.get(region.segment)
            if file is None or region.offset + region.length > file.nbytes:
                raise ValueError(f"{region} lies in no segment that was passed on")
            self._windows.show(pending.landing, self, file.descriptor, region)
        else:
            self._windows.own(pending.landing)
        return Message(header, pending.into[: region.length], landed=True)

    def _loss(self, cause: Exception) -> ConnectionLost:
        return ConnectionLost(f"{self._address} is gone ({cause}); dial again")

    def close(self) -> None:
        if not self._epoll.closed:
            self._windows.keep(self)
            self._doorbell.close()
            self._epoll.close()
            for file in self._files.values():
                os.close(file.descriptor)


@contextlib.contextmanager
def _closed_on_error(descriptor: int | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise


def _connect(address: str, timeout: float) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(timeout)
        line.connect("\0" + address.removeprefix(SCHEME))
        if peer_user(line) != os.getuid():
            raise PermissionError(f"user {peer_user(line)} listens there, not {os.getuid()}")
    except OSError as error:
        line.close()
        raise ServerUnreachable(f"nothing on this host listens at {address} ({error})") from error
    return line
