"""The packets between processes of one host: fixed-size descriptors, and open files.

A payload never passes through the socket. A packet names the payload's segment, which
was sent once before, as an open file.
"""

from __future__ import annotations

import enum
import os
import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from hubring.ps.transport.checksum import DamagedHeader
from hubring.ps.transport.shm.doorbell import Doorbell, Packet
from hubring.ps.transport.shm.segment import Arena, Region

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
        segment = self._arena.segment(number)
        assert segment is not None, "a segment lives as long as a view of it"
        self._sent.add(number)
        self._doorbell.send(Packet(Descriptor(Kind.SEGMENT, number).pack(), os.dup(segment.descriptor)))

    def _forget_released(self) -> None:
        """Tells the peer to drop segments that are gone. Called before each new segment."""
        for number in [number for number in self._sent if self._arena.segment(number) is None]:
            self._sent.discard(number)
            self._doorbell.send(Packet(Descriptor(Kind.FORGET, number).pack()))
