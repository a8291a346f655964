"""One connection between conductor and follower, over which neither outlives the other unnoticed.

A process that ends closes its connections. A machine that vanishes does not: the kernel asks it in silence
whether it is there (TCP keepalive), so that nobody has to send anything for that.
"""

from __future__ import annotations

import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from msgspec import DecodeError

from ps.errors import HubringError
from workers.compare.cluster.messages import Message, decode, encode

FRAME_SECONDS = 20
"""What a frame that has begun may take, and each of the two proofs."""
_IDLE, _BETWEEN, _TIMES = 5, 5, 3
"""Seconds of silence, and between questions; how many of them stay without an answer."""


class Lost(HubringError):
    """The other end is gone; the message says how that showed."""


class Wire:
    """One end; owns the socket.

    Args:
        end: A connected TCP socket.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        limit = struct.pack("ll", FRAME_SECONDS, 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _IDLE),
            (socket.TCP_KEEPINTVL, _BETWEEN),
            (socket.TCP_KEEPCNT, _TIMES),
            (socket.TCP_USER_TIMEOUT, 1000 * (_IDLE + _BETWEEN * _TIMES)),
            (socket.TCP_NODELAY, 1),
        ):
            end.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = Connection(end.detach())

    def prove(self, key: bytes, *, first: bool) -> None:
        """Makes sure that both ends hold the key, which is not sent.

        Args:
            key: The same on both ends.
            first: This end asks first; the other one answers first.

        Raises:
            Lost: The other end does not hold it, or says nothing.
        """
        steps = (deliver_challenge, answer_challenge)
        try:
            for step in steps if first else reversed(steps):
                step(self._connection, key)
        except (OSError, EOFError, AssertionError, AuthenticationError) as cause:
            raise Lost("the other end does not hold the key of this comparison") from cause

    def send(self, message: Message) -> None:
        """Sends one message.

        Raises:
            Lost: The other end is gone.
        """
        try:
            self._connection.send_bytes(encode(message))
        except OSError as cause:
            raise Lost(str(cause)) from cause

    def receive(self, timeout: float) -> Message | None:
        """The next message; None if none comes within `timeout` seconds.

        Raises:
            Lost: The other end is gone.
        """
        try:
            if not self._connection.poll(timeout):
                return None
            message: Message = decode(self._connection.recv_bytes())
        except (OSError, EOFError) as cause:
            raise Lost("the connection was closed" if isinstance(cause, EOFError) else str(cause)) from cause
        except DecodeError as cause:
            raise Lost(f"it speaks another version ({cause}): install the same one everywhere") from cause
        return message

    def close(self) -> None:
        """Ends it."""
        self._connection.close()
