"""Small packets, and open files with them, between two processes of one host.

A packet is a fixed-size descriptor and a header. A payload never passes through the socket: a packet names
the payload's segment, which was sent once before, as an open file.

The socket is a Unix socket that never blocks: packets wait here in order until the poller reports space in
the kernel's buffer. Packets are sent in trains, as many as fit into one datagram, because waking the other
process is the main cost.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import os
import select
import socket
import struct
from array import array
from collections import deque
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from hubring.ps.transport.base import MAX_HEADER, DamagedHeader
from hubring.ps.transport.mapping import Arena, Region

MAX_PACKET = MAX_HEADER + 1024
_MAX_TRAIN = MAX_PACKET + 4

MAX_WAITING = 4096
"""Packets for a peer that does not read, after which a shard reads no more of it."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_FILE_SPACE = socket.CMSG_LEN(array("i").itemsize)
"""Bytes for one descriptor beside the data."""
# As plain integers: operators of IntFlag are written in Python.
_NO_ROOM_FOR_FILE, _CUT = int(socket.MSG_CTRUNC), int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class Packet(NamedTuple):
    """One packet, and the descriptor sent with it, which the receiver closes."""

    data: bytes
    descriptor: int | None = None


class Doorbell:
    """One end of a connection. `epoll` reports when to call `receive` and `on_room`.

    Args:
        connection: A connected socket.
        epoll: Watches the socket from now on.
        most: Waiting packets above which `epoll` no longer reports packets of the peer. Only one end may stop
            reading, or both could wait for each other.
    """

    def __init__(self, connection: socket.socket, epoll: select.epoll, most: float = math.inf) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._epoll = epoll
        self._most = most
        self._waiting: deque[Packet] = deque()
        self.full = False
        """Whether packets wait for space in the kernel's buffer."""
        self.number = connection.fileno()
        epoll.register(self.number, select.EPOLLIN)

    def send(self, packet: Packet) -> None:
        """Queues a packet. The next `flush` sends it and closes its descriptor."""
        self._waiting.append(packet)

    def flush(self) -> None:
        """Sends the waiting packets, or leaves them to `on_room` if the socket is full.

        Raises:
            OSError: The other end is gone.
        """
        if self._waiting and not self.full:
            self.full = not self._send_trains()
        if self.full:
            self._watch()

    def _watch(self) -> None:
        reads = 0 if len(self._waiting) > self._most else select.EPOLLIN
        self._epoll.modify(self.number, reads | (select.EPOLLOUT if self.full else 0))

    def _send_trains(self) -> bool:
        """Sends as many packets as the socket accepts. Returns whether it sent all."""
        while self._waiting:
            room, train = _MAX_TRAIN, list[bytes]()
            descriptor = self._waiting[0].descriptor  # only the first packet of a train can have one
            for packet in self._waiting:
                room -= _LENGTH.size + len(packet.data)
                if train and (room < 0 or packet.descriptor is not None):
                    break
                train += (_LENGTH.pack(len(packet.data)), packet.data)
            try:
                if descriptor is None:
                    self._socket.sendmsg(train)
                else:
                    socket.send_fds(self._socket, train, [descriptor])
            except BlockingIOError:
                return False
            for _ in train[::2]:
                self._waiting.popleft()
            if descriptor is not None:
                os.close(descriptor)
        return True

    def on_room(self) -> None:
        """Sends waiting packets once the socket, which was full, may have room."""
        self.full = not self._send_trains()
        self._watch()

    def receive(self) -> list[Packet]:
        """Returns the packets of the next train, or an empty list.

        Raises:
            EOFError: The other end has closed the connection, or is gone.
            ValueError: The train is too large, or has more than one descriptor.
            OSError: This process has no descriptor free for the one in the train.
        """
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(_MAX_TRAIN, _FILE_SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        descriptors = _files(ancillary) if ancillary else []
        if flags & _NO_ROOM_FOR_FILE and not descriptors:  # there was room for one in the buffer
            raise OSError(
                errno.EMFILE, "the worker's memory needs a file descriptor, and this process has none"
            )
        if len(descriptors) > 1 or flags & _CUT:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError(f"a train of more than {_MAX_TRAIN} bytes or more than one descriptor")
        if not data:
            raise EOFError("the peer closed the connection")
        if not descriptors and len(data) > _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if len(data) == _LENGTH.size + length:  # almost always one packet
                return [Packet(data[_LENGTH.size :])]
        return split(data, descriptors[0] if descriptors else None)

    def hang_up(self) -> None:
        """Shuts the socket down but keeps it open. It becomes readable, and `receive` raises EOFError."""
        with contextlib.suppress(OSError):  # the other end has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. Waiting packets are lost."""
        if self._socket.fileno() >= 0:
            self._epoll.unregister(self.number)
            self._socket.close()
        while self._waiting:
            descriptor = self._waiting.popleft().descriptor
            if descriptor is not None:
                os.close(descriptor)


def _files(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Returns the descriptors that came beside the data."""
    found = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) // found.itemsize * found.itemsize])
    return found.tolist()


def split(data: bytes, descriptor: int | None) -> list[Packet]:
    """Splits a train into packets. The descriptor belongs to the first."""
    packets: list[Packet] = []
    while data:
        (length,) = _LENGTH.unpack_from(data) if len(data) >= _LENGTH.size else (len(data),)
        end = _LENGTH.size + length
        if len(data) < end:
            if descriptor is not None:
                os.close(descriptor)
            raise ValueError(f"a packet of {length} bytes in a train of {len(data)} bytes")
        packets.append(Packet(data[_LENGTH.size : end], None if packets else descriptor))
        data = data[end:]
    return packets


def peer_user(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


SCHEME = "shm://"
"""Prefix of a shard listener's address."""

VERSION = 3

_LAYOUT = struct.Struct("<BB6xQQQQQQQ")
_CHECKSUM = struct.Struct("<Q")
"""XXH3 of all bytes before it; the end of every packet."""


class Kind(enum.IntEnum):
    """The kind of a packet."""

    SEGMENT = 1  # the enclosed descriptor is segment number `tag` of the sender
    FORGET = 2  # segment number `tag` is no longer used
    REQUEST = 3
    WINDOWED = 4  # a request whose reply may be mapped at the region that it names
    LANDED = 5  # a reply; its payload, if any, was written to the region that the request named
    ENCLOSED = 6  # a reply whose payload is the enclosed segment
    SHOWN = 7  # a reply whose payload is in a segment of the sender, which the requester maps


class Descriptor(NamedTuple):
    """The start of every packet. A header and a checksum follow."""

    kind: int
    tag: int
    payload: Region = Region()
    into: Region = Region()

    def pack(self, header: bytes = b"") -> bytes:
        """Returns the packet's bytes."""
        packet = _LAYOUT.pack(VERSION, self.kind, self.tag, *self.payload, *self.into) + header
        return packet + _CHECKSUM.pack(xxh3_64_intdigest(packet))


def unpack(data: bytes) -> tuple[Descriptor, bytes]:
    """Returns a packet's descriptor and header.

    Raises:
        DamagedHeader: The packet does not match its checksum.
        ValueError: No peer of this version sends such a packet.
    """
    if len(data) < _LAYOUT.size + _CHECKSUM.size:
        raise ValueError(f"a packet of {len(data)} bytes is shorter than a descriptor")
    packet, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    version, kind, tag, *fields = _LAYOUT.unpack_from(packet)
    if version != VERSION:
        raise ValueError(f"a packet of version {version}; expected {VERSION}")
    if checksum != _CHECKSUM.pack(xxh3_64_intdigest(packet)):
        raise DamagedHeader(f"a packet of {len(data)} bytes does not match its checksum")
    return Descriptor(kind, tag, Region(*fields[:3]), Region(*fields[3:])), packet[_LAYOUT.size :]


class Introductions:
    """Sends an arena's segments to one peer, each when it is first used."""

    def __init__(self, arena: Arena, doorbell: Doorbell) -> None:
        self._arena = arena
        self._doorbell = doorbell
        self._sent: set[int] = set()

    def region(self, memory: memoryview | None) -> Region:
        """Returns the region by which the peer finds `memory`; an empty region if it is not the arena's."""
        region = self._arena.find(memory) if memory is not None and memory.nbytes else None
        if region is None:
            return Region()
        if region.segment not in self._sent:
            self._forget_released()
            self._send_segment(region.segment)
        return region

    def _send_segment(self, number: int) -> None:
        segment = self._arena.segments[number]  # it lives as long as a view of it
        self._sent.add(number)
        self._doorbell.send(Packet(Descriptor(Kind.SEGMENT, number).pack(), os.dup(segment.descriptor)))

    def _forget_released(self) -> None:
        """Tells the peer to drop segments that are gone. Called before each new segment."""
        for number in [number for number in self._sent if number not in self._arena.segments]:
            self._sent.discard(number)
            self._doorbell.send(Packet(Descriptor(Kind.FORGET, number).pack()))
