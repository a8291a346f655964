"""Connections without a token take few descriptors and little memory, and no worker is blamed for them."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from hubring.ps.core import bounds
from hubring.ps.core.bounds import Rejections
from hubring.ps.core.counters import usage
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.security.access import ShardLock
from hubring.ps.transport.base import Connection
from hubring.ps.transport.mapping import Arena
from hubring.ps.transport.shm.listener import ShmListener
from hubring.ps.transport.shm.packet import Doorbell
from hubring.ps.transport.zmq import newcomers
from hubring.ps.transport.zmq import socket as zmq_socket
from hubring.ps.transport.zmq.socket import PART_BYTES
from hubring.ps.transport.zmq.transport import ATTEMPTS, ZmqTransport
from tests.support.processes.stopwatch import until
from tests.support.transports.messages import PATIENCE, is_echoed
from tests.support.transports.serving import Serving, await_counts

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
LONG_COMMAND = b"\x06" + PART_BYTES.to_bytes(8)


def connected(address: str, source: str = "127.0.0.1") -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE, (source, 0))


@pytest.fixture(autouse=True)
def handshakes_do_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: strangers stay until others take their places."""
    monkeypatch.setattr(zmq_socket, "HANDSHAKE_MS", 3_600_000)
    monkeypatch.setattr(newcomers, "_HANDSHAKE_SECONDS", 3600.0)


class Guarded(Serving):
    """A ZeroMQ listener with a lock. Its end closes the connections that were opened here."""

    def __init__(self) -> None:
        self.lock, self.rejections = ShardLock(), Rejections()
        super().__init__(ZmqTransport(rejections=self.rejections, lock=self.lock))
        self._lines = contextlib.ExitStack()

    def strangers(self, count: int) -> list[socket.socket]:
        return [self._lines.enter_context(connected(self.address)) for _ in range(count)]

    def member(self) -> Connection:
        return self._lines.enter_context(self.line(self.lock.key))

    def stop(self) -> None:
        self._lines.close()
        super().stop()


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


def test_zmq_resets_a_connection_that_sends_much_before_its_handshake_ends() -> None:
    with Guarded() as server:
        lines = server.strangers(3)
        for line in lines:
            line.sendall(GREETING + LONG_COMMAND + bytes(100_000))
        assert all(map(has_ended, lines))
        await_counts(server.rejections, {"handshake": 3})
        assert is_echoed(server.member(), PART_BYTES)
    assert server.rejections.counts() == {"handshake": 3}


@pytest.fixture
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "MOST", 3)


@pytest.mark.usefixtures("room_for_three")
def test_zmq_has_few_connections_in_their_handshake_and_any_number_of_members() -> None:
    with Guarded() as server:
        members = [server.member() for _ in range(5)]
        before = server.rejections.counts()
        silent = server.strangers(5)
        assert all(map(has_ended, silent[:2])), "the oldest ones"
        assert not before
        await_counts(server.rejections, {"connections": 2})
        assert all(map(is_echoed, [*members, server.member()]))


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
        assert bounds.out_of_descriptors(caught.value)
        socket.send_fds(theirs, [b"\1\0\0\0x"], [0, 1])
        with pytest.raises(ValueError, match="more than one descriptor"):
            bell.receive()
        bell.close()


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource as r; from hubring.ps.core import bounds as b;"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 200)); b.raise_descriptor_limit();"
        "print(b.descriptor_limit(), b.descriptor_share(1000, 4))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["200", "50"]


def test_a_process_without_a_free_descriptor_knows_its_usage() -> None:
    usage()
    with no_free_descriptor():
        assert usage().memory_bytes > 0


def test_the_watch_of_newcomers_forgets_what_has_ended() -> None:
    with Guarded() as server:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            connected(server.address).close()
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_strangers_of_many_addresses_take_no_place_of_members_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "MOST", 16)
    with Guarded() as server, contextlib.ExitStack() as stack:
        sources = [*(f"127.0.0.{number}" for number in range(2, 16)), "127.0.0.1", "127.0.0.1", "127.0.1.1"]
        lines = [stack.enter_context(connected(server.address, source)) for source in sources]
        assert has_ended(lines[0])
        assert all(map(is_open, lines[1:]))
    assert server.rejections.counts() == {"connections": 1}


def is_open(line: socket.socket) -> bool:
    """Whether a connection is open; what came on it is gone then."""
    line.setblocking(False)
    try:
        while line.recv(1000):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def test_idle_newcomers_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[int] = Counter()
    look = newcomers.Newcomers._look

    def counted(watch: newcomers.Newcomers, number: int) -> None:
        looks[number] += 1
        look(watch, number)

    monkeypatch.setattr(newcomers.Newcomers, "_look", counted)
    with Guarded() as server:
        for count in range(1, 21):
            server.strangers(1)
            until(lambda: len(looks) >= count)  # noqa: B023 - is called at once
    assert max(looks.values()) < 5


def test_the_watch_of_newcomers_survives_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add, failed = newcomers.Newcomers._add, threading.Event()

    def fails_once(watch: newcomers.Newcomers, number: int) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("only once")
        add(watch, number)

    monkeypatch.setattr(newcomers.Newcomers, "_add", fails_once)
    with Guarded() as server:
        with connected(server.address):
            assert failed.wait(PATIENCE)
        (line,) = server.strangers(1)
        line.sendall(GREETING + LONG_COMMAND + bytes(100_000))
        assert has_ended(line)
        await_counts(server.rejections, {"handshake": 1})
    assert "the watch goes on" in caplog.text


def test_a_descriptor_that_became_another_kind_of_socket_is_no_newcomer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(ZmqTransport().listen("127.0.0.1")) as listener:
        assert listener._newcomers is not None
        before = len(os.listdir("/proc/self/fd"))
        listener._newcomers._add(ours.fileno())
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("room_for_three")
def test_zmq_closes_others_although_the_oldest_one_takes_nothing_that_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Guarded() as server:
        (deaf,) = server.strangers(1)
        port = deaf.getsockname()[1]
        counted = zmq_socket.counts

        def counts(line: socket.socket) -> zmq_socket.Counts:
            """As the kernel counts for a peer whose window is 0."""
            seen = counted(line)
            with contextlib.suppress(OSError):  # the peer has gone
                return seen._replace(sent=seen.sent * (line.getpeername()[1] != port))
            return seen

        monkeypatch.setattr(newcomers, "counts", counts)
        others = server.strangers(5)
        assert all(map(has_ended, (deaf, *others[:2])))
        assert all(map(is_open, others[2:]))
    assert server.rejections.counts() == {"connections": 3}


@pytest.mark.usefixtures("room_for_three")
def test_no_connection_is_closed_if_the_kernel_reports_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_newer_kernel = struct.Struct(f"{zmq_socket._INFO.format}1000x")
    monkeypatch.setattr(zmq_socket, "_INFO", of_a_newer_kernel)
    with Guarded() as server:
        silent = server.strangers(5)
        assert is_echoed(server.member())
        assert all(map(is_open, silent))
    assert server.rejections.counts() == {}
