"""Bytes that no program of a job sends: noise, and messages that begin well."""

from __future__ import annotations

import random
import struct

from hubring.protos import data_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
"""The greeting of ZeroMQ's protocol, version 3.0."""
STRANGER = 1 << 40
"""No process has so high an incarnation, so the message of a stranger is never one of a member."""
LONGEST = 4096
_DESCRIPTOR = struct.Struct("<BB6xQQQQQQQ")


def noise(draw: random.Random) -> bytes:
    """Returns 1 to LONGEST random bytes."""
    return draw.randbytes(draw.randint(1, LONGEST))


def http(draw: random.Random) -> bytes:
    """Returns a request that is not quite one of HTTP/1.1."""
    path = "/" + draw.choice(("", "metrics", "events", "../" * 40, "%00" * 200, "a" * LONGEST))
    method = draw.choice(("GET", "POST", "\x00GET", "G" * 2000))
    fields = [f"X-{number}: {'b' * draw.randint(0, 200)}" for number in range(draw.randint(0, 50))]
    length = draw.choice(("-1", "99999999999999999999", "4", "x"))
    head = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *fields]
    return "\r\n".join([*head, "", ""]).encode()[: draw.randint(1, 1 << 14)]


def http2(draw: random.Random) -> bytes:
    """Returns the start of an HTTP/2 connection, and frames of all kinds with random content."""
    frames = [PREFACE]
    for _ in range(draw.randint(1, 8)):
        content = draw.randbytes(draw.randint(0, 200))
        length = draw.choice((len(content), len(content), (1 << 24) - 1, 0))
        head = length.to_bytes(3) + bytes([draw.randrange(12), draw.randrange(256)])
        frames.append(head + draw.randrange(1 << 31).to_bytes(4) + content)
    return b"".join(frames)


def zmtp(draw: random.Random) -> bytes:
    """Returns a greeting of ZeroMQ, and frames with lengths up to the largest."""
    frames = [ZMTP]
    for _ in range(draw.randint(1, 8)):
        content = draw.randbytes(draw.randint(0, 200))
        length = draw.choice((len(content), len(content), (1 << 63) - 1, 1 << 40))
        frames.append(bytes([draw.choice((0, 1, 2, 3, 4, 6, 255))]) + length.to_bytes(8) + content)
    return b"".join(frames)


STREAMS = (noise, http, http2, zmtp)
"""What a TCP port may receive."""


def header(draw: random.Random) -> bytes:
    """Returns a request of the data plane from a stranger: well formed, random, or cut off."""
    message = pb.Header(
        request=draw.getrandbits(64),
        payload_bytes=draw.choice((0, 4, 1 << 33, (1 << 64) - 1)),
        dtype=draw.randrange(11),  # type: ignore[arg-type]
        shape=[draw.choice((-1, 0, 3, 1 << 62)) for _ in range(draw.randrange(4))],
        codec=draw.choice(("", "int8", "topk:0.01", "nothing")),
        rank=draw.randrange(4),
        incarnation=(STRANGER + draw.getrandbits(16)).to_bytes(24),
    )
    body = draw.choice((message.init, message.push, message.pull, message.contribute))
    body.SetInParent()
    data = message.SerializeToString()
    return draw.choice((data, data[: draw.randrange(len(data))], noise(draw)))


def frame(draw: random.Random) -> bytes:
    """Returns a frame of a gRPC stream of the data plane."""
    message = header(draw)
    payload = draw.randbytes(draw.choice((0, 4, 2000)))
    whole = pb.Frame(payload=payload).SerializeToString()
    return draw.choice((b"\x0a" + bytes([min(len(message), 127)]) + message + whole, whole, noise(draw)))


def packet(draw: random.Random) -> bytes:
    """Returns a packet of the shared memory transport, with regions in segments that do not exist."""
    numbers = [draw.choice((0, 1, draw.getrandbits(64), (1 << 64) - 1)) for _ in range(7)]
    head = _DESCRIPTOR.pack(draw.choice((2, 2, 2, 0, 9)), draw.randrange(10), *numbers)
    return draw.choice((head + header(draw), head[: draw.randrange(1, len(head))], noise(draw)))
