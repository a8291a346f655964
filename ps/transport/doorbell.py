"""Small packets between two processes of one host, and open files with them.

A Unix socket of whole packets, which never blocks: what the kernel has no room
for waits here, in order, until the poller says that there is room.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque
from typing import NamedTuple

from ps.transport.base import MAX_HEADER

MAX_PACKET = MAX_HEADER + 1024
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
        self.number = line.fileno()
        epoll.register(self.number, select.EPOLLIN)

    def send(self, packet: Packet) -> None:
        """Sends a packet now or, if the line is full, later; closes its descriptor once it is out.

        Raises:
            OSError: The other end is gone.
        """
        self._waiting.append(packet)
        if len(self._waiting) == 1:
            self._flush()
            if self._waiting:
                self._epoll.modify(self.number, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self) -> None:
        """Sends what waits, as far as there is room."""
        while self._waiting:
            data, descriptor = self._waiting[0]
            try:
                socket.send_fds(self._line, [data], [] if descriptor is None else [descriptor])
            except BlockingIOError:
                return
            self._waiting.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def on_room(self) -> None:
        """Sends what waits, and asks the poller for no more once all is out."""
        if self._waiting:
            self._flush()
            if not self._waiting:
                self._epoll.modify(self.number, select.EPOLLIN)

    def receive(self) -> Packet | None:
        """The next packet; None if there is none yet.

        Raises:
            EOFError: The other end has closed, or is gone.
            ValueError: The packet is larger than any of ours, or brings more than one descriptor.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._line, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(str(error)) from error
        if len(descriptors) > 1 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("a packet beyond all bounds")
        if not data:
            raise EOFError("it closed the line")
        return Packet(data, descriptors[0] if descriptors else None)

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


def peer_user(line: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel vouches for it."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)
