"""Shared memory: the wire between processes of one user on one Linux host.

A Unix socket carries descriptors of fixed form and the header behind them; a
payload never goes through it. A worker's payload lies in a segment of its own,
which the shard maps once and reads in place; the reply is written straight into
the worker's memory where `into` lies in a segment too, and otherwise comes in a
segment of its own. The socket's name is in the abstract namespace, so neither it
nor the segments leave anything on the host.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import secrets
import select
import socket
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from ps.errors import ConnectionLost, ServerUnreachable, UsageError
from ps.transport.base import MAX_HEADER, Envelope, Message, ReturnPath
from ps.transport.doorbell import Doorbell, Packet, peer_user
from ps.transport.memory import copy, land
from ps.transport.segment import Arena, Place, attach, enclose

log = logging.getLogger(__name__)

VERSION = 1
AT_ONCE = 64
"""Packets taken from one peer before the others and the replies get their turn."""

MAX_SEGMENTS = 4096
"""Segments that one peer may have mapped at a time."""

_SCHEME = "shm://"
_BACKLOG = 1024


class _Kind(enum.IntEnum):
    SEGMENT = 1  # the descriptor enclosed is segment number `tag` of the sender
    FORGET = 2  # segment number `tag` is used no more
    REQUEST = 3
    REPLY = 4  # the payload, if any, has landed in the place that the request named
    ENCLOSED = 5  # a reply whose payload is the segment enclosed


class _Descriptor(NamedTuple):
    """What every packet begins with."""

    kind: int
    tag: int
    payload: Place = Place()
    into: Place = Place()

    def pack(self, header: bytes = b"") -> bytes:
        return _LAYOUT.pack(VERSION, self.kind, self.tag, *self.payload, *self.into) + header


_LAYOUT = struct.Struct("<BB6xQQQQQQQ")


def _unpack(data: bytes) -> tuple[_Descriptor, bytes]:
    if len(data) < _LAYOUT.size:
        raise ValueError(f"a packet of {len(data)} bytes, shorter than a descriptor")
    version, kind, tag, *places = _LAYOUT.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"descriptors of version {version}; this end speaks {VERSION}")
    return _Descriptor(kind, tag, Place(*places[:3]), Place(*places[3:])), data[_LAYOUT.size :]


class ShmTransport:
    """The segments of one process, and the lines on which it passes them on."""

    name = "shm"

    def __init__(self) -> None:
        self._arena = Arena()

    def listen(self, host: str) -> ShmListener:
        return ShmListener()

    def dial(self, address: str, timeout: float) -> ShmConnection:
        return ShmConnection(self._arena, address, timeout)

    def allocate(self, nbytes: int) -> memoryview:
        return self._arena.allocate(nbytes)

    def window(self, nbytes: int) -> memoryview:
        return self.allocate(nbytes)


@dataclass(slots=True)
class _Pending:
    """A request under way: keeps its memory alive until the reply is there."""

    payload: memoryview | None
    into: memoryview | None
    bounce: memoryview | None = None


class ShmConnection:
    """A worker's end."""

    def __init__(self, arena: Arena, address: str, timeout: float) -> None:
        self._arena = arena
        self._address = address
        self._tags = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._announced: set[int] = set()
        self._bounces: defaultdict[int, list[memoryview]] = defaultdict(list)
        line = _connect(address, timeout)
        self._epoll = select.epoll()
        self._waitable = self._epoll.fileno()
        self._doorbell = Doorbell(line, self._epoll)

    @property
    def waitable(self) -> int:
        return self._waitable

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if len(message.header) > MAX_HEADER:
            raise UsageError(f"a header of {len(message.header)} bytes; at most {MAX_HEADER} can be sent")
        tag = next(self._tags)
        pending = self._pending[tag] = _Pending(message.payload, into)
        try:
            descriptor = _Descriptor(_Kind.REQUEST, tag, self._place(pending), self._announce(into))
            self._doorbell.send(Packet(descriptor.pack(message.header)))
        except OSError as error:
            raise self._loss(error) from error

    def _place(self, pending: _Pending) -> Place:
        """Where the shard finds the payload; one from elsewhere is copied into a segment first."""
        payload = pending.payload
        if payload is None or not payload.nbytes:
            return Place()
        place = self._announce(payload)
        if not place.length:
            pending.bounce = self._borrow(payload.nbytes)
            copy(payload, pending.bounce)
            place = self._announce(pending.bounce[: payload.nbytes])
        return place

    def _announce(self, memory: memoryview | None) -> Place:
        """Makes sure that the shard has mapped the segment in which `memory` lies, if it lies in one."""
        place = self._arena.find(memory) if memory is not None and memory.nbytes else None
        if place is None:
            return Place()
        if place.segment not in self._announced:
            self._forget_dead_segments()
            self._introduce(place.segment)
        return place

    def _introduce(self, number: int) -> None:
        segment = self._arena.segment(number)
        assert segment is not None, "a segment lives as long as a view of it"
        self._announced.add(number)
        self._doorbell.send(Packet(_Descriptor(_Kind.SEGMENT, number).pack(), os.dup(segment.descriptor)))

    def _forget_dead_segments(self) -> None:
        """A new segment is the moment to let the shard unmap those that are gone."""
        for number in [number for number in self._announced if self._arena.segment(number) is None]:
            self._announced.discard(number)
            self._doorbell.send(Packet(_Descriptor(_Kind.FORGET, number).pack()))

    def _borrow(self, nbytes: int) -> memoryview:
        """Memory of ours that no request uses; powers of two, so that it is soon of use again."""
        room = 1 << (nbytes - 1).bit_length()
        free = self._bounces[room]
        return free.pop() if free else self._arena.allocate(room)

    def receive(self) -> list[Message]:
        messages: list[Message] = []
        try:
            self._doorbell.on_room()
            while (packet := self._doorbell.receive()) is not None:
                messages.append(self._reply(packet))
        except (EOFError, OSError, ValueError) as error:
            self._doorbell.hang_up()  # so that the next call finds the end too
            if not messages:
                raise self._loss(error) from error
        return messages

    def _reply(self, packet: Packet) -> Message:
        enclosed = None if packet.descriptor is None else _attach_and_close(packet.descriptor)
        descriptor, header = _unpack(packet.data)
        pending = self._pending.pop(descriptor.tag, None)
        if pending is None:
            raise ValueError(f"a reply to request {descriptor.tag}, which was never sent")
        if pending.bounce is not None:
            self._bounces[pending.bounce.nbytes].append(pending.bounce)
        if descriptor.kind == _Kind.ENCLOSED:
            return Message(header, enclosed)
        length = descriptor.payload.length
        if not length:
            return Message(header)
        if pending.into is None or length > pending.into.nbytes:
            raise ValueError(f"a reply of {length} bytes landed where there was no room for it")
        return Message(header, pending.into[:length], landed=True)

    def _loss(self, cause: Exception) -> ConnectionLost:
        return ConnectionLost(f"{self._address} is gone ({cause}); dial again")

    def close(self) -> None:
        if not self._epoll.closed:
            self._doorbell.close()
            self._epoll.close()


@dataclass(slots=True)
class _Peer:
    """A worker as the listener knows it."""

    doorbell: Doorbell
    segments: dict[int, memoryview] = field(default_factory=dict)

    def memory(self, place: Place) -> memoryview | None:
        """The worker's bytes at `place`.

        Raises:
            ValueError: There are none.
        """
        number, offset, length = place
        if not length:
            return None
        segment = self.segments.get(number)
        if segment is None or offset + length > segment.nbytes:
            raise ValueError(f"{place} lies in no segment that was passed on")
        return segment[offset : offset + length]


class _ReturnPath(NamedTuple):
    peer: _Peer
    tag: int
    into: memoryview | None


class ShmListener:
    """A shard's end; one epoll watches for newcomers and all peers."""

    def __init__(self) -> None:
        name = f"hubring-{secrets.token_hex(16)}"
        self._address = _SCHEME + name
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind("\0" + name)
        self._door.listen(_BACKLOG)
        self._door.setblocking(False)
        self._epoll = select.epoll()
        self._waitable = self._epoll.fileno()
        self._epoll.register(self._door, select.EPOLLIN)
        self._peers: dict[int, _Peer] = {}

    @property
    def address(self) -> str:
        return self._address

    @property
    def waitable(self) -> int:
        return self._waitable

    def receive(self) -> list[Envelope]:
        envelopes: list[Envelope] = []
        for number, events in self._epoll.poll(0):
            if number == self._door.fileno():
                self._accept()
            elif (peer := self._peers.get(number)) is not None:
                self._serve(peer, events, envelopes)
        return envelopes

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            line, _ = self._door.accept()
            user = peer_user(line)
            if user != os.getuid():
                log.warning("turned away user %d: shared memory is for user %d alone", user, os.getuid())
                line.close()
                return
            peer = _Peer(Doorbell(line, self._epoll))
            self._peers[peer.doorbell.number] = peer

    def _serve(self, peer: _Peer, events: int, envelopes: list[Envelope]) -> None:
        """Takes in what one peer says; one that breaks the rules, or is gone, is dropped."""
        try:
            if events & select.EPOLLOUT:
                peer.doorbell.on_room()
            for _ in range(AT_ONCE):
                packet = peer.doorbell.receive()
                if packet is None:
                    return
                envelopes.extend(self._take(peer, packet))
        except EOFError:
            self._drop(peer)
        except (OSError, ValueError) as error:
            log.warning("dropped a peer on this host: %s", error)
            self._drop(peer)

    def _take(self, peer: _Peer, packet: Packet) -> list[Envelope]:
        enclosed = None if packet.descriptor is None else _attach_and_close(packet.descriptor)
        (kind, tag, payload, into), header = _unpack(packet.data)
        if kind == _Kind.REQUEST:
            message = Message(header, peer.memory(payload))
            return [Envelope(message, _ReturnPath(peer, tag, peer.memory(into)))]
        if kind == _Kind.SEGMENT and enclosed is not None and len(peer.segments) < MAX_SEGMENTS:
            peer.segments[tag] = enclosed
        elif kind == _Kind.FORGET:
            peer.segments.pop(tag, None)
        else:
            raise ValueError(f"a packet of kind {kind} that makes no sense, or one segment too many")
        return []

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        assert isinstance(reply_to, _ReturnPath)
        peer, tag, into = reply_to
        if self._peers.get(peer.doorbell.number) is not peer:
            return
        try:
            peer.doorbell.send(_reply_packet(tag, into, message))
        except OSError as error:
            log.warning("could not answer a peer on this host: %s", error)
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.doorbell.number]
        peer.doorbell.close()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._door.close()
        self._epoll.close()


def _reply_packet(tag: int, into: memoryview | None, message: Message) -> Packet:
    payload = message.payload
    if payload is None or not payload.nbytes:
        return Packet(_Descriptor(_Kind.REPLY, tag).pack(message.header))
    landed = land(payload, into)
    if landed is not None:
        return Packet(_Descriptor(_Kind.REPLY, tag, Place(length=landed.nbytes)).pack(message.header))
    return Packet(_Descriptor(_Kind.ENCLOSED, tag).pack(message.header), enclose(payload))


def _attach_and_close(descriptor: int) -> memoryview:
    try:
        return attach(descriptor)
    finally:
        os.close(descriptor)


def _connect(address: str, timeout: float) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(timeout)
        line.connect("\0" + address.removeprefix(_SCHEME))
        if peer_user(line) != os.getuid():
            raise PermissionError(f"user {peer_user(line)} listens there, not {os.getuid()}")
    except OSError as error:
        line.close()
        raise ServerUnreachable(f"nothing on this host listens at {address} ({error})") from error
    return line
