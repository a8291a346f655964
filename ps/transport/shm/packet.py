"""What processes of one host tell each other about memory: packets of fixed form, and open files.

A payload never goes through the line. A packet says in which segment it lies,
and the segment itself was passed on once, as an open file.
"""

from __future__ import annotations

import enum
import os
import struct
from typing import NamedTuple

from hubring.ps.transport.shm.doorbell import Doorbell, Packet
from hubring.ps.transport.shm.segment import Arena, Region

VERSION = 2

_LAYOUT = struct.Struct("<BB6xQQQQQQQ")


class Kind(enum.IntEnum):
    """What a packet is about."""

    SEGMENT = 1  # the descriptor enclosed is segment number `tag` of the sender
    FORGET = 2  # segment number `tag` is used no more
    REQUEST = 3
    WINDOWED = 4  # a request whose reply may be shown in the place that it names
    LANDED = 5  # a reply; the payload, if any, was written to the place that the request named
    ENCLOSED = 6  # a reply whose payload is the segment enclosed
    SHOWN = 7  # a reply whose payload lies in a segment of the sender, and may be read there


class Descriptor(NamedTuple):
    """What every packet begins with; the rest is a header."""

    kind: int
    tag: int
    payload: Region = Region()
    into: Region = Region()

    def pack(self, header: bytes = b"") -> bytes:
        """The packet's bytes."""
        return _LAYOUT.pack(VERSION, self.kind, self.tag, *self.payload, *self.into) + header


def unpack(data: bytes) -> tuple[Descriptor, bytes]:
    """A packet's descriptor and header.

    Raises:
        ValueError: No peer of this version sends this.
    """
    if len(data) < _LAYOUT.size:
        raise ValueError(f"a packet of {len(data)} bytes, shorter than a descriptor")
    version, kind, tag, *places = _LAYOUT.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"descriptors of version {version}; this end speaks {VERSION}")
    return Descriptor(kind, tag, Region(*places[:3]), Region(*places[3:])), data[_LAYOUT.size :]


class Introductions:
    """Passes an arena's segments on to one peer, each when it is first spoken of."""

    def __init__(self, arena: Arena, doorbell: Doorbell) -> None:
        self._arena = arena
        self._doorbell = doorbell
        self._made: set[int] = set()

    def region(self, memory: memoryview | None) -> Region:
        """Where the peer finds `memory` from now on; no place if it is not the arena's."""
        region = self._arena.find(memory) if memory is not None and memory.nbytes else None
        if region is None:
            return Region()
        if region.segment not in self._made:
            self._forget_dead()
            self._introduce(region.segment)
        return region

    def _introduce(self, number: int) -> None:
        segment = self._arena.segment(number)
        assert segment is not None, "a segment lives as long as a view of it"
        self._made.add(number)
        self._doorbell.send(Packet(Descriptor(Kind.SEGMENT, number).pack(), os.dup(segment.descriptor)))

    def _forget_dead(self) -> None:
        """A new segment is the moment to let the peer drop those that are gone."""
        for number in [number for number in self._made if self._arena.segment(number) is None]:
            self._made.discard(number)
            self._doorbell.send(Packet(Descriptor(Kind.FORGET, number).pack()))
