"""Connections without a token take few descriptors and little memory, and no worker is blamed for them."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hubring.ps.core import descriptors
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.core.rejections import Rejections
from hubring.ps.security.door import Lock, lock
from hubring.ps.transport.shm.doorbell import Doorbell
from hubring.ps.transport.shm.listener import ShmListener
from hubring.ps.transport.shm.segment import Arena
from hubring.ps.transport.zmq import newcomers
from hubring.ps.transport.zmq.socket import PART_BYTES
from hubring.ps.transport.zmq.transport import ATTEMPTS, ZmqTransport
from tests.support.processes.stopwatch import Stopwatch
from tests.support.transports.messages import PATIENCE, ask, content, noise, request
from tests.support.transports.serving import Serving, await_counts

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
LONG_COMMAND = b"\x06" + PART_BYTES.to_bytes(8)


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def has_ended(line: socket.socket) -> bool:
    try:
        while line.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["plain", "curve"])
def test_zmq_resets_a_connection_that_sends_much_before_its_handshake_ends(kind: str) -> None:
    rejections, own = Rejections(), lock(tls=False, curve=kind == "curve")
    transport = ZmqTransport(rejections=rejections, lock=own)
    with Serving(transport) as server, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connected(server.address)) for _ in range(3)]
        for line in lines:
            line.sendall(GREETING.replace(b"PLAIN", kind.upper().encode()) + LONG_COMMAND + bytes(100_000))
        assert all(map(has_ended, lines))
        await_counts(rejections, {"handshake": 3})
        with contextlib.closing(transport.dial(server.address, PATIENCE, own.door)) as member:
            assert content(ask(member, request(1, noise(PART_BYTES)))) == bytes(noise(PART_BYTES))
    assert rejections.counts() == {"handshake": 3}


def test_zmq_has_few_connections_in_their_handshake_and_any_number_of_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newcomers, "MOST", 3)
    rejections, own = Rejections(), Lock()
    transport = ZmqTransport(rejections=rejections, lock=own)
    with Serving(transport) as server, contextlib.ExitStack() as stack:
        members = [
            stack.enter_context(contextlib.closing(transport.dial(server.address, PATIENCE, own.door)))
            for _ in range(5)
        ]
        before = rejections.counts()
        silent = [stack.enter_context(connected(server.address)) for _ in range(5)]
        assert all(map(has_ended, silent[:2])), "the oldest ones"
        assert not before
        await_counts(rejections, {"connections": 2})
        for number, line in enumerate(members):
            assert content(ask(line, request(number, noise(5)))) == bytes(noise(5))
        late = stack.enter_context(contextlib.closing(transport.dial(server.address, PATIENCE, own.door)))
        assert content(ask(late, request(9, noise(5)))) == bytes(noise(5))


def test_zmq_sends_a_whole_part_with_curve() -> None:
    own = lock(tls=True, curve=True)
    transport = ZmqTransport(lock=own)
    with (
        Serving(transport) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE, own.door)) as line,
    ):
        for nbytes in (PART_BYTES, 2 * PART_BYTES + 1):
            assert content(ask(line, request(1, noise(nbytes)))) == bytes(noise(nbytes))


def test_a_worker_connects_again_if_a_shard_closes_its_connection_in_the_handshake() -> None:
    closed = 0
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def close_all() -> None:
            nonlocal closed
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()
                    closed += 1

        thread = threading.Thread(target=close_all)
        thread.start()
        with pytest.raises(ServerUnreachable, match="closed the connection before the end"):
            ZmqTransport().dial(f"tcp://127.0.0.1:{listening.getsockname()[1]}", PATIENCE)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert closed == ATTEMPTS


def test_a_shard_without_a_descriptor_accepts_later_and_does_not_spin() -> None:
    rejections = Rejections()
    listener = ShmListener(Arena(), rejections)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, contextlib.closing(listener):
        poller = select.poll()
        poller.register(listener.waitable, select.POLLIN)
        peer.connect("\0" + listener.address.removeprefix("shm://"))
        assert poller.poll(1000 * PATIENCE)
        with no_free_descriptor():
            assert listener.receive() == []
            assert not poller.poll(0)
        assert rejections.counts() == {"descriptors": 1}
        assert poller.poll(1000 * PATIENCE), "it accepts again after a while"
        listener.receive()
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):  # the connection is open
            peer.recv(1)
    assert rejections.counts() == {"descriptors": 1}


def test_a_worker_is_not_blamed_for_the_descriptor_that_this_process_lacks() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, select.epoll() as epoll:
        bell = Doorbell(ours, epoll)
        socket.send_fds(theirs, [b"\1\0\0\0x"], [0])
        with no_free_descriptor(), pytest.raises(OSError, match="this process has none") as caught:
            bell.receive()
        assert descriptors.out_of_them(caught.value)
        socket.send_fds(theirs, [b"\1\0\0\0x"], [0, 1])
        with pytest.raises(ValueError, match="more than one descriptor"):
            bell.receive()
        bell.close()


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource as r; from hubring.ps.core import descriptors as d;"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 200)); d.raise_limit(); print(d.limit(), d.share(1000, 4))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["200", "50"]


def test_the_watch_of_newcomers_forgets_what_has_ended() -> None:
    with Serving(ZmqTransport(lock=Lock())) as server:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            connected(server.address).close()
        watch = Stopwatch()
        while len(os.listdir("/proc/self/fd")) > before:
            assert watch.seconds < PATIENCE
            time.sleep(0.01)
