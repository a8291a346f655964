"""gRPC calls as bytes, of a client that grants no room for the replies, or that reads nothing."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW = 4
_SECONDS = 10.0
_SEGMENT_BYTES = 88
"""The smallest segment that Linux accepts. The kernels then store only 15 to 40 kB of what the peer sends."""
_FILLING = 9_000
"""Frames that are each answered with 9 bytes. gRPC reads no more once 10,000 answers are not sent."""


def unread_calls(address: str, method: str, message: bytes, count: int, *, tls: bool) -> socket.socket:
    """Makes calls of one message each whose replies the peer cannot send, as HTTP/2's window for them is 0.

    Args:
        address: `HOST:PORT`.
        method: As gRPC names it.
        message: Of each call.
        count: The number of calls.
        tls: Whether the server uses TLS; its certificate is not checked.
    """
    line = _connected(address, tls=tls)
    no_window = struct.pack(">HI", _INITIAL_WINDOW, 0)
    line.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, no_window) + _frame(_SETTINGS, _ACK, 0, b""))
    for call in _calls(method, message, count, tls=tls):
        line.sendall(call)
    return line


def deaf_calls(address: str, method: str, message: bytes, count: int, *, tls: bool) -> socket.socket:
    """Makes calls on a connection whose client reads nothing, and whose peer can send no more.

    Args:
        address: As in `unread_calls`, and likewise the others.
        method: As gRPC names it.
        message: Of each call.
        count: The number of calls.
        tls: Whether the server uses TLS.
    """
    line = _connected(address, tls=tls, segment=_SEGMENT_BYTES)
    line.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") * _FILLING)
    for call in _calls(method, message, count, tls=tls):
        line.sendall(call)
    return line


def _connected(address: str, *, tls: bool, segment: int = 0) -> socket.socket:
    host, _, port = address.rpartition(":")
    line = socket.socket()
    line.settimeout(_SECONDS)
    if segment:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    line.connect((host, int(port)))
    if not tls:
        return line
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(line)


def _calls(method: str, message: bytes, count: int, *, tls: bool) -> Iterator[bytes]:
    headers = b"".join(
        map(
            _literal,
            (b":method", b":scheme", b":path", b":authority", b"content-type", b"te"),
            (b"POST", b"https" if tls else b"http", method.encode(), b"x", b"application/grpc", b"trailers"),
        )
    )
    body = b"\0" + struct.pack(">I", len(message)) + message
    for stream in range(1, 2 * count, 2):
        yield _frame(_HEADERS, _END_HEADERS, stream, headers) + _frame(_DATA, _END_STREAM, stream, body)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def _literal(name: bytes, value: bytes) -> bytes:
    """Returns a header field in HPACK, without a table and without compression."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
