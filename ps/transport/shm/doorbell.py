"""Small packets, and open files with them, between two processes of one host.

A Unix socket that never blocks: packets wait here in order until the poller reports space in the
kernel's buffer. Packets are sent in trains, as many as fit into one datagram, because waking the
other process is the main cost.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import struct
from collections import deque
from typing import NamedTuple

from hubring.ps.transport.base import MAX_HEADER

MAX_PACKET = MAX_HEADER + 1024
_MAX_TRAIN = MAX_PACKET + 4

MAX_WAITING = 4096
"""Packets for a peer that does not read, after which a shard reads no more of it."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


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
        self._full = False
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
        if self._waiting and not self._full:
            self._full = not self._send_trains()
        if self._full:
            self._watch()

    def _watch(self) -> None:
        reads = 0 if len(self._waiting) > self._most else select.EPOLLIN
        self._epoll.modify(self.number, reads | (select.EPOLLOUT if self._full else 0))

    def _send_trains(self) -> bool:
        """Sends as many packets as the socket accepts. Returns whether it sent all."""
        while self._waiting:
            train = self._next_train()
            descriptors = [] if train[0].descriptor is None else [train[0].descriptor]
            data = [part for packet in train for part in (_LENGTH.pack(len(packet.data)), packet.data)]
            try:
                socket.send_fds(self._socket, data, descriptors)
            except BlockingIOError:
                return False
            for _ in train:
                self._waiting.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _next_train(self) -> list[Packet]:
        """Returns the first waiting packets that fit. Only the first packet can have a descriptor."""
        room = _MAX_TRAIN
        train: list[Packet] = []
        for packet in self._waiting:
            room -= _LENGTH.size + len(packet.data)
            if train and (room < 0 or packet.descriptor is not None):
                break
            train.append(packet)
        return train

    def on_room(self) -> None:
        """Sends waiting packets after the socket was full."""
        if self._full:
            self._full = not self._send_trains()
            self._watch()

    def receive(self) -> list[Packet]:
        """Returns the packets of the next train, or an empty list.

        Raises:
            EOFError: The other end has closed the connection, or is gone.
            ValueError: The train is too large, or has more than one descriptor.
            OSError: This process has no descriptor free for the one in the train.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, _MAX_TRAIN, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if flags & socket.MSG_CTRUNC and not descriptors:  # there was room for one in the buffer
            raise OSError(
                errno.EMFILE, "the worker's memory needs a file descriptor, and this process has none"
            )
        if len(descriptors) > 1 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError(f"a train of more than {_MAX_TRAIN} bytes or more than one descriptor")
        if not data:
            raise EOFError("the peer closed the connection")
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
