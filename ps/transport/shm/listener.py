"""A shard's end of the shared memory wire: takes requests of all workers on its host, and replies."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
from dataclasses import dataclass, field
from typing import NamedTuple

from hubring.ps.transport.base import Envelope, Message, ReturnPath
from hubring.ps.transport.memory import land
from hubring.ps.transport.shm.connection import SCHEME
from hubring.ps.transport.shm.doorbell import Doorbell, Packet, peer_user
from hubring.ps.transport.shm.memory_map import PAGE
from hubring.ps.transport.shm.packet import Descriptor, Introductions, Kind, unpack
from hubring.ps.transport.shm.segment import Arena, Region, attach, enclose

log = logging.getLogger(__name__)

MAX_SEGMENTS = 4096
"""Segments that one peer may have mapped at a time."""

_BACKLOG = 1024


@dataclass(slots=True)
class _Peer:
    """A worker as the listener knows it."""

    doorbell: Doorbell
    introductions: Introductions
    segments: dict[int, memoryview] = field(default_factory=dict)

    def memory(self, region: Region) -> memoryview | None:
        """The worker's bytes at `region`.

        Raises:
            ValueError: There are none.
        """
        number, offset, length = region
        if not length:
            return None
        segment = self.segments.get(number)
        if segment is None or offset + length > segment.nbytes:
            raise ValueError(f"{region} lies in no segment that was passed on")
        return segment[offset : offset + length]


class _ReturnPath(NamedTuple):
    peer: _Peer
    tag: int
    into: memoryview | None
    windowed: bool


class ShmListener:
    """A shard's end; one epoll watches for newcomers and all peers."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        name = f"hubring-{secrets.token_hex(16)}"
        self._address = SCHEME + name
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind("\0" + name)
        self._door.listen(_BACKLOG)
        self._door.setblocking(False)
        self._epoll = select.epoll()
        self._waitable = self._epoll.fileno()
        self._epoll.register(self._door, select.EPOLLIN)
        self._peers: dict[int, _Peer] = {}
        self._answered: dict[int, _Peer] = {}
        """Those with replies that wait for `flush`."""

    @property
    def address(self) -> str:
        return self._address

    @property
    def waitable(self) -> int:
        return self._waitable

    def receive(self) -> list[Envelope]:
        envelopes: list[Envelope] = []
        for number, _ in self._epoll.poll(0):
            if number == self._door.fileno():
                self._accept()
            elif (peer := self._peers.get(number)) is not None:
                self._serve(peer, envelopes)
        return envelopes

    def _accept(self) -> None:
        try:
            line, _ = self._door.accept()
        except BlockingIOError:
            return
        except OSError as error:  # too many open files, or it was gone before we came
            log.warning("let nobody in: %s", error)
            return
        user = peer_user(line)
        if user != os.getuid():
            log.warning("turned away user %d: shared memory is for user %d alone", user, os.getuid())
            line.close()
            return
        doorbell = Doorbell(line, self._epoll)
        peer = _Peer(doorbell, Introductions(self._arena, doorbell))
        self._peers[peer.doorbell.number] = peer

    def _serve(self, peer: _Peer, envelopes: list[Envelope]) -> None:
        """Takes in what one peer says next; one that breaks the rules, or is gone, is dropped."""
        try:
            peer.doorbell.on_room()
            for packet in peer.doorbell.receive():  # one train, so that all peers get their turn
                envelopes.extend(self._take(peer, packet))
        except EOFError:
            self._drop(peer)
        except (OSError, ValueError) as error:
            log.warning("dropped a peer on this host: %s", error)
            self._drop(peer)

    def _take(self, peer: _Peer, packet: Packet) -> list[Envelope]:
        enclosed = None if packet.descriptor is None else attach(packet.descriptor)
        (kind, tag, payload, into), header = unpack(packet.data)
        if kind in (Kind.REQUEST, Kind.WINDOWED):
            message = Message(header, peer.memory(payload))
            way = _ReturnPath(peer, tag, peer.memory(into), kind == Kind.WINDOWED)
            return [Envelope(message, way)]
        if kind == Kind.SEGMENT and enclosed is not None and len(peer.segments) < MAX_SEGMENTS:
            peer.segments[tag] = enclosed
        elif kind == Kind.FORGET:
            peer.segments.pop(tag, None)
        else:
            raise ValueError(f"a packet of kind {kind} that makes no sense, or one segment too many")
        return []

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        assert isinstance(reply_to, _ReturnPath)
        peer = reply_to.peer
        if self._peers.get(peer.doorbell.number) is peer:
            peer.doorbell.send(_reply_packet(reply_to, message, stable))
            self._answered[peer.doorbell.number] = peer

    def flush(self) -> None:
        answered, self._answered = self._answered, {}
        for peer in answered.values():
            try:
                peer.doorbell.flush()
            except OSError:  # it is gone, which the membership will hear of elsewhere
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._answered.pop(peer.doorbell.number, None)
        del self._peers[peer.doorbell.number]
        peer.doorbell.close()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._door.close()
        self._epoll.close()


def _reply_packet(way: _ReturnPath, message: Message, stable: bool) -> Packet:
    payload = message.payload
    if payload is None or not payload.nbytes:
        return Packet(Descriptor(Kind.LANDED, way.tag).pack(message.header))
    if stable and way.windowed and way.into is not None and payload.nbytes == way.into.nbytes:
        region = way.peer.introductions.region(payload)
        if region.length and region.offset % PAGE == 0:
            return Packet(Descriptor(Kind.SHOWN, way.tag, region).pack(message.header))
    landed = land(payload, way.into)
    if landed is not None:
        region = Region(length=landed.nbytes)
        return Packet(Descriptor(Kind.LANDED, way.tag, region).pack(message.header))
    return Packet(Descriptor(Kind.ENCLOSED, way.tag).pack(message.header), enclose(payload))
