"""Sends garbage to every port of a live job."""

from __future__ import annotations

import array
import os
import random
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress

import grpc
import zmq

from hubring.protos import control_pb2
from hubring.ps.security.access import unproved
from hubring.ps.transport.grpc.channel import open_channel
from tests.campaign.fuzz.garbage import STREAMS, frame, header, noise, packet
from tests.campaign.fuzz.ports import Ports

HOST = "127.0.0.1"
SECONDS = 0.5
"""How long an attacker waits for an answer."""
METHODS = [method.name for method in control_pb2.DESCRIPTOR.services_by_name["Control"].methods]
FRAMES = 4
"""Messages that an attacker sends on one connection."""


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
        with open_channel(address, unproved(address, SECONDS)) as channel:
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
