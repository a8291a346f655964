"""One way in which a stranger floods a job; prints what it sent and how it was answered.

python -m tests.support.scripts.flood ATTACK HOST CONTROL PAGE DATA... [@SOCKET...]

CONTROL and PAGE are the server's ports, DATA those of a shard, and SOCKET its name for shared memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import grpc

from hubring.ps.transport.grpc.channel import open_async_channel
from hubring.ps.transport.zmq.socket import PART_BYTES
from tests.support.certificates import stranger_access
from tests.support.transports.http2 import CONTINUATIONS, endless_headers

NOBODY = 65534
SECONDS = 6.0
"""How long an attack goes on; longer than any limit on a handshake."""
ANSWER_SECONDS = 2.0
CONNECTIONS = 3000
HANDSHAKES = 200
"""Connections that each fill what ZeroMQ reads of one command."""
MEBI = 1 << 20
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01"
"""The start of ZeroMQ's protocol, version 3.1; a mechanism of 20 bytes, a role and 31 bytes follow."""
LONG, MORE, COMMAND = 2, 1, 4
Call = Callable[..., Any]
METHODS = ("Join", "Heartbeat", "Plan", "Rendezvous", "Status", "Checkpoint")


class Target(NamedTuple):
    """Where a job listens."""

    host: str
    control: int
    page: int
    data: list[int]
    shared: list[str]

    @property
    def ports(self) -> list[int]:
        return [self.control, self.page, *self.data]


class Flood:
    """The attacks, one method each.

    Args:
        target: Where they go.
    """

    def __init__(self, target: Target) -> None:
        self._at = target
        self.count: Counter[str] = Counter()
        self._ends = time.monotonic() + SECONDS

    # Calls.

    async def calls(self, secret: str = "") -> None:
        """Calls of all kinds, without a token."""
        address = f"{self._at.host}:{self._at.control}"
        async with open_async_channel(address, stranger_access(address, ANSWER_SECONDS, secret)) as channel:

            async def one(name: str) -> None:
                call: Call = channel.unary_unary(f"/hubring.v1.Control/{name}")
                while time.monotonic() < self._ends:
                    await self._note(call(bytes(1000), timeout=ANSWER_SECONDS))

            await asyncio.gather(*(one(name) for name in METHODS for _ in range(8)))

    async def wrong_tokens(self) -> None:
        """The same with a token of another server."""
        await self.calls("0" * 64)

    async def continuations(self) -> None:
        """Headers that do not end, on connections that have not proved who they are."""

        def send(port: int) -> None:
            with suppress(OSError), endless_headers(f"{self._at.host}:{port}") as line:
                while time.monotonic() < self._ends:
                    line.sendall(CONTINUATIONS)
                    self.count["MB sent"] += 1

        ports = [self._at.control, *self._at.data]
        await asyncio.gather(*(asyncio.to_thread(send, port) for port in ports for _ in range(4)))

    async def _note(self, call: Awaitable[object]) -> None:
        try:
            await call
            self.count["allowed"] += 1
        except grpc.aio.AioRpcError as error:
            self.count[error.code().name] += 1
        except asyncio.CancelledError:  # as gRPC raises for a call that the server cancelled
            self.count["CANCELLED"] += 1

    # Bytes.

    async def noise(self) -> None:
        """Random bytes on every port, on new connections all the time."""
        while time.monotonic() < self._ends:
            for port in self._at.ports:
                with suppress(OSError), socket.create_connection((self._at.host, port), 1.0) as one:
                    one.sendall(os.urandom(64 << 10))
                    self.count["sent"] += 1
            await asyncio.sleep(0.001)

    async def connections(self) -> None:
        """Thousands of connections to each port that send nothing."""
        self._hold(lambda number: b"", self._at.ports)

    async def half_open(self) -> None:
        """Thousands of connections that begin as a client of their port does, and go no further."""
        starts = (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", GREETING, b"GET / HTTP/1.1\r\nHost: ", _client_hello())
        self._hold(lambda number: starts[number % len(starts)], self._at.ports)

    def _hold(self, start: Callable[[int], bytes], ports: list[int], connections: int = CONNECTIONS) -> None:
        with ExitStack() as stack:
            for number in range(connections):
                for port in ports:
                    with suppress(OSError):
                        one = stack.enter_context(socket.create_connection((self._at.host, port), 1.0))
                        one.sendall(start(number))
                        self.count["open"] += 1
            time.sleep(max(0.0, self._ends - time.monotonic()))

    async def pages(self) -> None:
        """Requests to the page: slow ones, long ones, and streams that nobody reads."""
        host = f"Host: 127.0.0.1:{self._at.page}\r\n".encode()
        requests = (
            b"GET /events HTTP/1.1\r\n" + host + b"\r\n",
            b"GET /metrics HTTP/1.1\r\n" + host,
            b"POST /end HTTP/1.1\r\n" + host + b"Content-Length: 1000000000\r\n\r\n",
            b"GET /" + b"a" * MEBI,
        )
        self._hold(lambda number: requests[number % 4], [self._at.page], 1000)

    # ZeroMQ.

    async def zmq_frames(self) -> None:
        """Frames of ZeroMQ with up to 300 MiB: commands of the handshake, messages, endless parts."""
        for port in self._at.data:
            for flags in (COMMAND | LONG, LONG, LONG | MORE):
                for mechanism in (b"NULL", b"PLAIN"):
                    for size in (300 * MEBI, 7 * MEBI, MEBI):
                        self._send(port, _handshake(mechanism), flags, size)

    async def zmq_handshakes(self) -> None:
        """Handshakes of ZeroMQ whose next command is almost complete, each on a connection of its own."""
        with ExitStack() as stack:
            for port in self._at.data:
                for _ in range(HANDSHAKES):
                    with suppress(OSError):
                        one = stack.enter_context(socket.create_connection((self._at.host, port), 1.0))
                        one.settimeout(ANSWER_SECONDS)
                        one.sendall(_handshake(b"PLAIN") + bytes([COMMAND | LONG]) + PART_BYTES.to_bytes(8))
                        one.sendall(bytes(PART_BYTES - 1))
                        self.count["filled"] += 1

    def _send(self, port: int, start: bytes, flags: int, size: int) -> None:
        """Sends frames of a size until the listener has had enough, or 300 MiB."""
        frame, sent = bytes([flags]) + size.to_bytes(8), 0
        with suppress(OSError), socket.create_connection((self._at.host, port), 1.0) as one:
            one.settimeout(ANSWER_SECONDS)
            one.sendall(start)
            while sent < 300 * MEBI:
                one.sendall(frame)
                for _ in range(size // MEBI):
                    one.sendall(bytes(MEBI))
                    sent += MEBI
        self.count["MB sent"] += sent // MEBI

    # Shared memory.

    async def shared_memory(self) -> None:
        """Connections to the socket for shared memory."""
        for _ in range(CONNECTIONS):
            for name in self._at.shared:
                with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
                    one.settimeout(ANSWER_SECONDS)
                    one.connect("\0" + name)
                    one.send(bytes(1000))
                    self.count["sent"] += 1


def _handshake(mechanism: bytes) -> bytes:
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    start = GREETING + mechanism.ljust(20, b"\0") + bytes(32)
    return start + (bytes([COMMAND, len(ready)]) + ready if mechanism == b"NULL" else b"")


def _client_hello() -> bytes:
    sent = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="hubring")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


def _become_nobody() -> None:
    "".encode("idna")  # imports the codec, which nobody may not be allowed to read
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def main(attack: str, host: str, control: str, page: str, *rest: str) -> None:
    _become_nobody()
    data = [int(port) for port in rest if port[0] != "@"]
    flood = Flood(Target(host, int(control), int(page), data, [name[1:] for name in rest if name[0] == "@"]))
    asyncio.run(getattr(flood, attack)())
    print(json.dumps(flood.count))


if __name__ == "__main__":
    main(*sys.argv[1:])
