"""A second descriptor of one of ZeroMQ's TCP connections: what the kernel counted, and how to reset it."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from typing import NamedTuple

_CLOSED = 7  # TCP_CLOSE
_INFO = struct.Struct("<B127xQ64xQQ")
"""The start of Linux's tcp_info: state, bytes_received, and (since 4.19) bytes_sent and bytes_retrans."""

_LIBC = ctypes.CDLL(None)
_UNSPECIFIED = (ctypes.c_ubyte * 16)()  # a sockaddr of AF_UNSPEC


class Counts(NamedTuple):
    """What the kernel knows of a connection.

    Attributes:
        closed: Whether it has ended.
        received: Bytes that the peer sent.
        sent: Bytes that the peer was sent, each counted once. ZeroMQ greets a peer at once, so this is 0 only
            if the peer grants no room, or if the kernel does not count.
    """

    closed: bool
    received: int
    sent: int


def duplicate(number: int) -> socket.socket:
    """Returns a descriptor of our own for ZeroMQ's, which ZeroMQ may close at any time.

    Raises:
        OSError: The connection has ended, or no descriptor is free.
    """
    own = os.dup(number)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def counts(line: socket.socket) -> Counts:
    """Returns the counts of a connection; none on an old kernel."""
    try:
        info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        state, received, sent, again = _INFO.unpack(info)
    except (OSError, struct.error):
        return Counts(closed=False, received=0, sent=0)
    return Counts(state == _CLOSED, received, sent - again)


def reset(line: socket.socket) -> None:
    """Ends a connection, and frees what the kernel has received, which ZeroMQ would read after `shutdown`."""
    _LIBC.connect(line.fileno(), _UNSPECIFIED, len(_UNSPECIFIED))  # connect(2) of AF_UNSPEC
