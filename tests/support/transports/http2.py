"""gRPC calls as bytes, of a client that grants no room for the replies."""

from __future__ import annotations

import socket
import ssl
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW = 4


def unread_calls(address: str, method: str, message: bytes, count: int, *, tls: bool) -> socket.socket:
    """Makes calls of one message each whose replies the peer cannot send, as HTTP/2's window for them is 0.

    Args:
        address: `HOST:PORT`.
        method: As gRPC names it.
        message: Of each call.
        count: The number of calls.
        tls: Whether the server uses TLS; its certificate is not checked.
    """
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), 10.0)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        line = context.wrap_socket(line)
    no_window = struct.pack(">HI", _INITIAL_WINDOW, 0)
    line.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, no_window) + _frame(_SETTINGS, _ACK, 0, b""))
    headers = b"".join(
        map(
            _literal,
            (b":method", b":scheme", b":path", b":authority", b"content-type", b"te"),
            (b"POST", b"https" if tls else b"http", method.encode(), b"x", b"application/grpc", b"trailers"),
        )
    )
    body = b"\0" + struct.pack(">I", len(message)) + message
    for stream in range(1, 2 * count, 2):
        call = _frame(_HEADERS, _END_HEADERS, stream, headers)
        line.sendall(call + _frame(_DATA, _END_STREAM, stream, body))
    return line


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def _literal(name: bytes, value: bytes) -> bytes:
    """Returns a header field in HPACK, without a table and without compression."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
