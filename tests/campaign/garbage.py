"""Sends garbage to every port of a live job: noise, and messages that begin well."""

from __future__ import annotations

import array
import os
import random
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress

import grpc
import zmq

from hubring.protos import control_pb2
from hubring.protos import data_pb2 as pb
from hubring.ps.transport.grpc.channel import open_channel
from tests.campaign.processes import Ports
from tests.support.certificates import stranger_access

HOST = "127.0.0.1"
SECONDS = 0.5
"""How long an attacker waits for an answer."""
METHODS = [method.name for method in control_pb2.DESCRIPTOR.services_by_name["Control"].methods]
FRAMES = 4
"""Messages that an attacker sends on one connection."""
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


class Attack:
    """Attackers of one job. Each method is one connection.

    Methods of ShardControl are left out: most take no argument, so any bytes are a valid request.

    Args:
        ports: Where the job listens.
        draw: Chooses the garbage.
    """

    def __init__(self, ports: Ports, draw: random.Random) -> None:
        self._ports = ports
        self._draw = draw
        self.sent = 0
        """Bytes that a socket of the job took."""

    def run(self, rounds: int) -> None:
        """Each round sends a piece of garbage of each kind to each port."""
        for _ in range(rounds):
            for port in self._ports.tcp:
                for stream in STREAMS:
                    self._tcp(port, stream(self._draw))
            self._control()
            for port in self._ports.shards:
                self._grpc(port)
                self._zmq(port)
            for name in self._ports.shm:
                self._shm(name)

    def _tcp(self, port: int, content: bytes) -> None:
        with suppress(OSError), socket.create_connection((HOST, port), SECONDS) as line:
            line.sendall(content)
            self.sent += len(content)
            if self._draw.random() < 0.5:
                line.shutdown(socket.SHUT_WR)
                line.settimeout(0.05)
                line.recv(1 << 16)

    def _control(self) -> None:
        """Calls a method of the control plane with bytes that are not its request."""
        method = self._draw.choice(METHODS)
        address = f"{HOST}:{self._ports.control}"
        with open_channel(address, stranger_access(address, 2 * SECONDS)) as channel:
            kind = channel.unary_stream if method == "Connect" else channel.unary_unary
            call: Callable[..., object] = kind(f"/hubring.v1.Control/{method}")
            content = noise(self._draw)
            with suppress(grpc.RpcError):
                answer = call(content, timeout=SECONDS)
                if method == "Connect":
                    next(answer)  # type: ignore[call-overload]
            self.sent += len(content)

    def _grpc(self, port: int) -> None:
        """Opens a stream of the data plane; a port of ZeroMQ refuses it."""
        frames = [frame(self._draw) for _ in range(FRAMES)]
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            stream: Callable[..., Iterable[object]] = channel.stream_stream("/hubring.v1.Data/Exchange")
            with suppress(grpc.RpcError):
                for _ in stream(iter(frames), timeout=SECONDS):
                    pass
        self.sent += sum(map(len, frames))

    def _zmq(self, port: int) -> None:
        """Sends messages of one to four parts; a port of gRPC takes none."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.sndtimeo = 100
            dealer.connect(f"tcp://{HOST}:{port}")
            for _ in range(FRAMES):
                parts = [header(self._draw), *(noise(self._draw) for _ in range(self._draw.randrange(4)))]
                with suppress(zmq.Again):
                    dealer.send_multipart(parts)
                    self.sent += sum(map(len, parts))
            dealer.poll(50)

    def _shm(self, name: bytes) -> None:
        """Sends packets, some with a file that is not a segment."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(SECONDS)
            line.connect(b"\0" + name)
            for _ in range(FRAMES):
                content = packet(self._draw)
                files = [os.memfd_create("garbage")] if self._draw.random() < 0.5 else []
                try:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
                    line.sendmsg([content], rights if files else [])
                finally:
                    for file in files:
                        os.close(file)
                self.sent += len(content)
