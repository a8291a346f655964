"""Small packets between two processes of one host, and open files with them.

A Unix socket, which never blocks: what the kernel has no room for waits here, in
order, until the poller says that there is room. Packets go in trains, as many as
fit into one datagram, because what costs is to wake the other process.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque
from typing import NamedTuple

from hubring.ps.transport.base import MAX_HEADER

MAX_PACKET = MAX_HEADER + 1024
_MAX_TRAIN = MAX_PACKET + 4
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


class Packet(NamedTuple):
    """One packet, and the descriptor that came with it, which its receiver closes."""

    data: bytes
    descriptor: int | None = None


class Doorbell:
    """One end of a line; `epoll` tells when it should `receive`, and `on_room`."""

    def __init__(self, line: socket.socket, epoll: select.epoll) -> None:
        line.setblocking(False)
        self._line = line
        self._epoll = epoll
        self._waiting: deque[Packet] = deque()
        self._full = False
        self.number = line.fileno()
        epoll.register(self.number, select.EPOLLIN)

    def send(self, packet: Packet) -> None:
        """Takes a packet that goes out with the next `flush`, which closes its descriptor."""
        self._waiting.append(packet)

    def flush(self) -> None:
        """Sends what waits now or, if the line is full, later.

        Raises:
            OSError: The other end is gone.
        """
        if self._waiting and not self._full:
            self._full = not self._send_trains()
            if self._full:
                self._epoll.modify(self.number, select.EPOLLIN | select.EPOLLOUT)

    def _send_trains(self) -> bool:
        """Sends as far as there is room; whether that was all."""
        while self._waiting:
            train = self._next_train()
            descriptors = [] if train[0].descriptor is None else [train[0].descriptor]
            data = [part for packet in train for part in (_LENGTH.pack(len(packet.data)), packet.data)]
            try:
                socket.send_fds(self._line, data, descriptors)
            except BlockingIOError:
                return False
            for _ in train:
                self._waiting.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _next_train(self) -> list[Packet]:
        """The first packets that wait, as many as fit; a descriptor travels at their head."""
        room = _MAX_TRAIN
        train: list[Packet] = []
        for packet in self._waiting:
            room -= _LENGTH.size + len(packet.data)
            if train and (room < 0 or packet.descriptor is not None):
                break
            train.append(packet)
        return train

    def on_room(self) -> None:
        """Sends what waits, and asks the poller for no more once all is out."""
        if self._full and self._send_trains():
            self._full = False
            self._epoll.modify(self.number, select.EPOLLIN)

    def receive(self) -> list[Packet]:
        """The packets of the next train; none if there is none yet.

        Raises:
            EOFError: The other end has closed, or is gone.
            ValueError: They are larger than any of ours, or bring more than one descriptor.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._line, _MAX_TRAIN, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if len(descriptors) > 1 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("a packet beyond all bounds")
        if not data:
            raise EOFError("it closed the line")
        return _uncoupled(data, descriptors[0] if descriptors else None)

    def hang_up(self) -> None:
        """Ends the talk but keeps the line: from now on it is readable, and `receive` finds the end."""
        with contextlib.suppress(OSError):  # the other end has hung up already
            self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the line; what still waits is lost."""
        if self._line.fileno() >= 0:
            self._epoll.unregister(self.number)
            self._line.close()
        while self._waiting:
            descriptor = self._waiting.popleft().descriptor
            if descriptor is not None:
                os.close(descriptor)


def _uncoupled(data: bytes, descriptor: int | None) -> list[Packet]:
    """The packets of one train; the descriptor belongs to the first."""
    packets: list[Packet] = []
    while data:
        (length,) = _LENGTH.unpack_from(data) if len(data) >= _LENGTH.size else (len(data),)
        end = _LENGTH.size + length
        if len(data) < end:
            if descriptor is not None:
                os.close(descriptor)
            raise ValueError(f"a packet of {length} bytes in {len(data)}")
        packets.append(Packet(data[_LENGTH.size : end], None if packets else descriptor))
        data = data[end:]
    return packets


def peer_user(line: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel vouches for it."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)
