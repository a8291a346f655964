"""Shared memory: the wire between processes of one user on one Linux host.

A Unix socket carries descriptors of fixed form and the header behind them; a
payload never goes through it. A worker's payload lies in a segment of its own,
which the shard maps once and reads in place. A reply that is `stable` and lies in
the shard's own segment is shown in the worker's window: its pages are mapped there
the first time, and nothing at all is moved from then on. Any other is written
straight into the worker's memory where `into` lies in a segment, and otherwise
comes in a segment of its own. The socket's name is in the abstract namespace, so
neither it nor the segments leave anything on the host.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import select
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hubring.ps.core import huge_pages
from hubring.ps.core.errors import ConnectionLost, ServerUnreachable, UsageError
from hubring.ps.transport.base import MAX_HEADER, Envelope, Message, ReturnPath
from hubring.ps.transport.memory import copy, land
from hubring.ps.transport.shm.doorbell import Doorbell, Packet, peer_user
from hubring.ps.transport.shm.packet import Descriptor, Introductions, Kind, unpack
from hubring.ps.transport.shm.pages import PAGE
from hubring.ps.transport.shm.segment import Arena, Place, attach, enclose, sealed_size
from hubring.ps.transport.shm.window import Windows

log = logging.getLogger(__name__)

MAX_SEGMENTS = 4096
"""Segments that one peer may have mapped at a time."""

_SCHEME = "shm://"
_BACKLOG = 1024
_NOWHERE = Place()


class ShmTransport:
    """The segments of one process, and the lines on which it passes them on.

    Args:
        guarded: Peers may read this process's segments but not write to them: a shard's, where
            replies never land.
    """

    name = "shm"

    def __init__(self, *, guarded: bool = False) -> None:
        self._serves = guarded
        self._arena = Arena(guarded=guarded)
        self._windows = Windows(self._arena)

    def listen(self, host: str) -> ShmListener:
        return ShmListener(self._arena)

    def dial(self, address: str, timeout: float) -> ShmConnection:
        return ShmConnection(self._arena, self._windows, address, timeout)

    def allocate(self, nbytes: int) -> memoryview:
        memory = self._arena.allocate(nbytes)
        if self._serves:  # a shard has others to answer meanwhile, and they may write there already
            threading.Thread(
                target=huge_pages.populate, args=(memory,), name="huge pages", daemon=True
            ).start()
        else:
            huge_pages.populate(memory)
        return memory

    def window(self, nbytes: int) -> memoryview:
        return self._arena.allocate(nbytes, window=True)


@dataclass(slots=True)
class _Pending:
    """A request under way: keeps its memory alive until the reply is there."""

    payload: memoryview | None
    into: memoryview | None
    home: Place = _NOWHERE
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
        payload = self._place(pending)
        pending.home = self._introductions.place(into)
        kind = Kind.WINDOWED if self._windows.fit(pending.home) else Kind.REQUEST
        self._doorbell.send(Packet(Descriptor(kind, tag, payload, pending.home).pack(message.header)))

    def _place(self, pending: _Pending) -> Place:
        """Where the shard finds the payload; one from elsewhere, or shown to us, is copied there first."""
        payload = pending.payload
        if payload is None or not payload.nbytes:
            return Place()
        place = self._introductions.place(payload)
        if not place.length or self._windows.overlap(place):
            pending.bounce = self._borrow(payload.nbytes)
            copy(payload, pending.bounce)
            place = self._introductions.place(pending.bounce[: payload.nbytes])
        return place

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
        enclosed = None if packet.descriptor is None else _attach_and_close(packet.descriptor)
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
        place = descriptor.payload
        if not place.length:
            return Message(header)
        if pending.into is None or place.length > pending.into.nbytes:
            raise ValueError(f"a reply of {place.length} bytes landed where there was no room for it")
        if descriptor.kind == Kind.SHOWN:
            file = self._files.get(place.segment)
            if file is None or place.offset + place.length > file.nbytes:
                raise ValueError(f"{place} lies in no segment that was passed on")
            self._windows.show(pending.home, self, file.descriptor, place)
        else:
            self._windows.own(pending.home)
        return Message(header, pending.into[: place.length], landed=True)

    def _loss(self, cause: Exception) -> ConnectionLost:
        return ConnectionLost(f"{self._address} is gone ({cause}); dial again")

    def close(self) -> None:
        if not self._epoll.closed:
            self._windows.keep(self)
            self._doorbell.close()
            self._epoll.close()
            for file in self._files.values():
                os.close(file.descriptor)


@dataclass(slots=True)
class _Peer:
    """A worker as the listener knows it."""

    doorbell: Doorbell
    introductions: Introductions
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
    windowed: bool


class ShmListener:
    """A shard's end; one epoll watches for newcomers and all peers."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
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
        enclosed = None if packet.descriptor is None else _attach_and_close(packet.descriptor)
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
        place = way.peer.introductions.place(payload)
        if place.length and place.offset % PAGE == 0:
            return Packet(Descriptor(Kind.SHOWN, way.tag, place).pack(message.header))
    landed = land(payload, way.into)
    if landed is not None:
        place = Place(length=landed.nbytes)
        return Packet(Descriptor(Kind.LANDED, way.tag, place).pack(message.header))
    return Packet(Descriptor(Kind.ENCLOSED, way.tag).pack(message.header), enclose(payload))


@contextlib.contextmanager
def _closed_on_error(descriptor: int | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise


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
