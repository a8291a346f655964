"""A shard's end of the shared memory transport: receives requests from workers on its host, and replies."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from hubring.ps.core import bounds
from hubring.ps.core.bounds import Rejections
from hubring.ps.transport.base import DamagedHeader, Envelope, Message, ReturnPath
from hubring.ps.transport.mapping import PAGE, Arena, Region, attach, enclose, land
from hubring.ps.transport.shm.packet import (
    MAX_WAITING,
    SCHEME,
    Descriptor,
    Doorbell,
    Introductions,
    Kind,
    Packet,
    peer_user,
    unpack,
)

log = logging.getLogger(__name__)

MAX_PEERS = 1024
"""Maximum number of open connections, of which processes that are left over from other jobs may hold some.

They take at most a quarter of the process's descriptors.
"""

MAX_SEGMENTS = 4096
"""Maximum number of segments that one peer may have mapped."""

_BACKLOG = 1024


@dataclass(slots=True)
class _Peer:
    """A connected worker."""

    doorbell: Doorbell
    introductions: Introductions
    segments: dict[int, memoryview] = field(default_factory=dict)

    def memories(self, *regions: Region) -> list[memoryview | None]:
        """Returns the worker's bytes at each region; None for an empty one.

        Raises:
            ValueError: A region is not in a segment of the worker's.
        """
        found: list[memoryview | None] = []
        for region in regions:
            number, offset, length = region
            if not length:
                found.append(None)
                continue
            segment = self.segments.get(number)
            if segment is None or offset + length > segment.nbytes:
                raise ValueError(f"{region} is not in a received segment")
            found.append(segment[offset : offset + length])
        return found


class _ReturnPath(NamedTuple):
    peer: _Peer
    tag: int
    into: memoryview | None
    windowed: bool


class ShmListener:
    """A shard's end. One epoll watches for new connections and for all peers.

    Args:
        arena: This process's segments.
        rejections: Counts refused connections.
    """

    def __init__(self, arena: Arena, rejections: Rejections) -> None:
        self._arena = arena
        self._rejections = rejections
        name = f"hubring-{secrets.token_hex(16)}"
        self.address = SCHEME + name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + name)
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._epoll = select.epoll()
        self.waitable = self._epoll.fileno()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._accepts_again: threading.Timer | None = None
        """Runs while the system had no descriptor for a new connection."""
        self._peers: dict[int, _Peer] = {}
        self._answered: dict[int, _Peer] = {}
        """Peers with replies that wait for `flush`."""

    def receive(self) -> list[Envelope]:
        envelopes: list[Envelope] = []
        ready = dict(self._epoll.poll(0))
        for number in ready:
            if (peer := self._peers.get(number)) is not None:
                self._serve(peer, envelopes)
        if self._socket.fileno() in ready:  # last, so that a connection that has ended makes room
            self._accept()
        return envelopes

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if bounds.out_of_descriptors(error):
                text = f"cannot accept a connection for shared memory for now: {error}"
                self._rejections.add("descriptors", log, text)
                self._pause()
            return  # otherwise the peer has gone already
        if objection := self._objection(connection):
            self._rejections.add("connections", log, f"refused a connection for shared memory: {objection}")
            connection.close()
            return
        doorbell = Doorbell(connection, self._epoll, MAX_WAITING)
        peer = _Peer(doorbell, Introductions(self._arena, doorbell))
        self._peers[peer.doorbell.number] = peer

    def _pause(self) -> None:
        """Accepts no connection for a while: the socket stays readable, so the shard's loop would spin."""
        self._epoll.modify(self._socket, 0)
        again = partial(self._epoll.modify, self._socket, select.EPOLLIN)
        self._accepts_again = threading.Timer(bounds.DESCRIPTOR_PAUSE_SECONDS, again)
        self._accepts_again.daemon = True
        self._accepts_again.start()

    def _objection(self, connection: socket.socket) -> str:
        """Returns why a connection is refused; empty if it is not."""
        user, own = peer_user(connection), os.getuid()
        if user != own:
            return f"it is of user {user}; only user {own} can use shared memory"
        most = bounds.descriptor_share(MAX_PEERS, 4)
        if len(self._peers) >= most:
            return f"{most} are open; stop processes that are left over from other jobs"
        return ""

    def _serve(self, peer: _Peer, envelopes: list[Envelope]) -> None:
        """Receives a peer's next train. Drops a peer that violates the protocol or is gone."""
        try:
            if peer.doorbell.full:
                peer.doorbell.on_room()
            self._take(peer, envelopes)
        except EOFError:
            self._drop(peer)
        except DamagedHeader as error:
            self._drop(peer)
            nowhere = _ReturnPath(peer, 0, None, windowed=False)
            envelopes.append(Envelope(Message(b"", damage=str(error)), nowhere))
        except (OSError, ValueError) as error:
            text = f"closed the connection of a worker on this host: {error}"
            if isinstance(error, OSError) and bounds.out_of_descriptors(error):
                self._rejections.add("descriptors", log, text)
            else:
                log.warning("%s", text)
            self._drop(peer)

    def _take(self, peer: _Peer, envelopes: list[Envelope]) -> None:
        """Takes the packets of one train, so that no peer starves the others: requests, or about segments."""
        for packet in peer.doorbell.receive():
            enclosed = None if packet.descriptor is None else attach(packet.descriptor)
            (kind, tag, payload, into), header = unpack(packet.data)
            if kind in (Kind.REQUEST, Kind.WINDOWED):
                came, place = peer.memories(payload, into)
                path = _ReturnPath(peer, tag, place, kind == Kind.WINDOWED)
                envelopes.append(Envelope(Message(header, came), path))
            elif kind == Kind.SEGMENT and enclosed is not None and len(peer.segments) < MAX_SEGMENTS:
                peer.segments[tag] = enclosed
            elif kind == Kind.FORGET:
                peer.segments.pop(tag, None)
            else:
                raise ValueError(f"unexpected packet of kind {kind}, or more than {MAX_SEGMENTS} segments")

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
            except OSError:  # the peer is gone; its lease expires
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._answered.pop(peer.doorbell.number, None)
        del self._peers[peer.doorbell.number]
        peer.doorbell.close()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        if self._accepts_again is not None:
            self._accepts_again.cancel()
            self._accepts_again.join()
        self._socket.close()
        self._epoll.close()


def _reply_packet(path: _ReturnPath, message: Message, stable: bool) -> Packet:
    payload = message.payload
    if payload is None or not payload.nbytes:
        return Packet(Descriptor(Kind.LANDED, path.tag).pack(message.header))
    if stable and path.windowed and path.into is not None and payload.nbytes == path.into.nbytes:
        region = path.peer.introductions.region(payload)
        if region.length and region.offset % PAGE == 0:
            return Packet(Descriptor(Kind.SHOWN, path.tag, region).pack(message.header))
    landed = land(payload, path.into)
    if landed is not None:
        region = Region(length=landed.nbytes)
        return Packet(Descriptor(Kind.LANDED, path.tag, region).pack(message.header))
    return Packet(Descriptor(Kind.ENCLOSED, path.tag).pack(message.header), enclose(payload))
