"""Strangers who open many connections to a gRPC server keep few, and members keep theirs."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from hubring.ps.core.bounds import Rejections
from hubring.ps.security.access import ShardLock
from hubring.ps.security.certificate import make_certificate
from hubring.ps.transport.grpc.channel import open_channel
from hubring.ps.transport.grpc.newcomers import HANDSHAKE_MS, LOOK_SECONDS, MOST, MOST_EXPECTED, GrpcNewcomers
from hubring.ps.transport.grpc.transport import GrpcTransport
from tests.support.processes.stopwatch import PATIENCE, until
from tests.support.transports.serving import Serving


class Door:
    """A port of this process, which accepts at once."""

    def __init__(self) -> None:
        self._listens = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listens.getsockname()[1]
        self._lines: list[tuple[socket.socket, socket.socket]] = []

    def connect(self, number: int, source: int = 0) -> None:
        for _ in range(number):
            line = socket.create_connection(("127.0.0.1", self.port), PATIENCE, ("127.0.0.1", source))
            self._lines.append((line, self._listens.accept()[0]))

    @property
    def first(self) -> int:
        """The port at the other end of the first connection."""
        return int(self._lines[0][0].getsockname()[1])

    @property
    def left(self) -> list[int]:
        """The places of the connections that were not closed, in the order in which they came."""
        return [place for place, (_, line) in enumerate(self._lines) if _is_open(line)]

    def drop(self) -> None:
        for ends in self._lines:
            for end in reversed(ends):  # the accepted one last, so that its port is free at once
                end.close()
        self._lines.clear()

    def close(self) -> None:
        self.drop()
        self._listens.close()


def _is_open(line: socket.socket) -> bool:
    return line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\1"  # TCP_ESTABLISHED


@pytest.fixture
def door() -> Iterator[Door]:
    with contextlib.closing(Door()) as door:
        yield door


def test_beyond_the_most_the_oldest_are_closed_but_those_with_a_call_stay(door: Door) -> None:
    rejections = Rejections()
    watch = GrpcNewcomers(rejections)
    door.connect(MOST + 3)
    watch.admit(f"ipv4:127.0.0.1:{door.first}")
    assert watch.look(door.port, 0.0)
    assert len(door.left) == MOST + 1
    assert 0 in door.left
    door.connect(10)
    assert watch.look(door.port, 0.1)
    assert door.left[-10:] == list(range(MOST + 3, MOST + 13)), "those that came last"
    assert rejections.counts() == {"connections": 12}


def test_connections_that_are_older_than_a_handshake_stay(door: Door) -> None:
    watch = GrpcNewcomers(Rejections())
    door.connect(MOST)
    watch.look(door.port, 0.0)
    door.connect(MOST)
    assert not watch.look(door.port, HANDSHAKE_MS / 1000 + LOOK_SECONDS)


def test_the_members_of_a_job_may_connect_at_once(door: Door) -> None:
    watch = GrpcNewcomers(Rejections(), expected=200)
    door.connect(200 + MOST)
    assert not watch.look(door.port, 0.0)
    door.connect(1)
    assert watch.look(door.port, 0.0)
    assert len(door.left) == 200 + MOST


def test_members_that_came_leave_no_room_for_others(door: Door) -> None:
    watch = GrpcNewcomers(Rejections(), expected=10_000)
    door.connect(MOST_EXPECTED)
    watch.look(door.port, 0.0)
    door.connect(MOST + 5)
    assert watch.look(door.port, HANDSHAKE_MS / 1000 + LOOK_SECONDS)
    assert len(door.left) == MOST_EXPECTED + MOST


def test_a_member_that_left_does_not_leave_its_place_to_a_stranger_on_its_port(door: Door) -> None:
    watch = GrpcNewcomers(Rejections())
    door.connect(1)
    watch.admit(f"ipv4:127.0.0.1:{(port := door.first)}")
    watch.look(door.port, 0.0)
    door.drop()
    watch.look(door.port, 1.0)
    door.connect(1, source=port)
    door.connect(MOST)
    assert watch.look(door.port, 2.0)
    assert 0 not in door.left


def test_addresses_of_ipv4_and_ipv6_are_those_that_grpc_names() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listens:
        port = listens.getsockname()[1]
        watch = GrpcNewcomers(Rejections())
        with contextlib.ExitStack() as stack:
            lines = []
            for host in ["127.0.0.1", "::1"] * (MOST // 2 + 1):
                line = stack.enter_context(socket.create_connection((host, port)))
                lines.append(stack.enter_context(listens.accept()[0]))
                number = line.getsockname()[1]
                watch.admit(f"ipv4:{host}:{number}" if host == "127.0.0.1" else f"ipv6:%5B{host}%5D:{number}")
            assert not watch.look(port, 0.0)
            assert all(map(_is_open, lines))


def test_descriptors_that_were_closed_are_no_cover_for_strangers(door: Door) -> None:
    """Those of the page's connections, for example."""
    watch = GrpcNewcomers(Rejections())
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4 * MOST)]
    watch.look(door.port, 0.0)
    for each in others:
        os.close(each)
    watch.begin(door.port)
    door.connect(MOST + 20)
    until(lambda: len(door.left) == MOST)
    watch.close()


def test_the_watch_goes_on_after_no_descriptor_was_free(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    listdir, failed = os.listdir, threading.Event()

    def fails_once(path: str) -> list[str]:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "none is free")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", fails_once)
    watch = GrpcNewcomers(Rejections())
    watch.begin(door.port)
    assert failed.wait(PATIENCE)
    door.connect(2 * MOST)
    until(lambda: len(door.left) == MOST)
    watch.close()


STATS = "/hubring.v1.ShardControl/Stats"


def add_a_service(server: grpc.Server) -> None:
    def answered(asked: bytes, context: grpc.ServicerContext) -> bytes:
        return context.peer().encode()

    answer: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answered)
    handler = grpc.method_handlers_generic_handler("hubring.v1.ShardControl", {"Stats": answer})
    server.add_generic_rpc_handlers((handler,))


def test_a_shard_without_tls_does_not_remember_every_connection() -> None:
    listener = GrpcTransport([add_a_service]).listen("127.0.0.1")
    with contextlib.closing(listener), grpc.insecure_channel(listener.address) as channel:
        ask: Any = channel.unary_unary(STATS)
        ask(b"", timeout=PATIENCE)
        assert not listener._newcomers._members


def test_a_coordinator_that_calls_a_shard_keeps_its_connection() -> None:
    """A call that it makes meanwhile would fail with the job."""
    lock = ShardLock(identity=make_certificate())
    with Serving(GrpcTransport([add_a_service], lock=lock)) as server, contextlib.ExitStack() as stack:
        access = lock.key.access._replace(secret=lock.token)
        ask: Any = stack.enter_context(open_channel(server.address, access)).unary_unary(STATS)
        before = ask(b"", timeout=PATIENCE)
        host, _, port = server.address.rpartition(":")
        lines = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(MOST + 20)]
        ended = select.poll()
        for line in lines:
            ended.register(line, select.POLLIN)
        until(lambda: len(ended.poll(0)) >= 20)
        assert ask(b"", timeout=PATIENCE) == before
