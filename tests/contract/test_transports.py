"""Every transport passes the same checks; then what is particular to each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
import zmq

from hubring.protos import data_pb2 as pb
from hubring.protos.data_pb2_grpc import DataServicer, DataStub, add_DataServicer_to_server
from hubring.ps.core.errors import ConnectionLost
from hubring.ps.transport import registry
from hubring.ps.transport.backlog import BOUND, Backlog
from hubring.ps.transport.base import Envelope, Listener, Message, Transport
from hubring.ps.transport.grpc import listener as grpc_listener
from hubring.ps.transport.grpc import transport as grpc_client
from hubring.ps.transport.grpc.frame import CHUNK_BYTES, Assembly, MalformedFrame, to_frames
from hubring.ps.transport.grpc.listener import GREETING
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.shm.packet import VERSION
from hubring.ps.transport.shm.segment import enclose
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.zmq import socket as zmq_socket
from hubring.ps.transport.zmq.listener import ZmqListener
from hubring.ps.transport.zmq.transport import ZmqTransport
from tests.support.conformance import (
    CHECKS,
    PATIENCE,
    Answer,
    MakeTransport,
    Serving,
    answers_many_requests_in_any_order,
    ask,
    await_loss,
    content,
    echo,
    keeps_what_waits_where_it_is,
    noise,
    number_of,
    overtakes_only_by_priority,
    replies,
    request,
)
from tests.support.inproc import InprocTransport

Check = Callable[[MakeTransport], None]

KINDS: list[type[Transport]] = [InprocTransport, ZmqTransport, ShmTransport, GrpcTransport]
SLOW = {(answers_many_requests_in_any_order, GrpcTransport)}
PAIRS = [
    pytest.param(
        check,
        kind,
        id=f"{kind.name}-{check.__name__}",
        marks=pytest.mark.slow if (check, kind) in SLOW else (),
    )
    for kind in KINDS
    for check in CHECKS
]


@pytest.mark.parametrize(("check", "kind"), PAIRS)
def test_transport(check: Check, kind: type[Transport]) -> None:
    check(kind)


# Lanes run side by side, so of equal messages the later may arrive first; each key has one under way.
# Each has a backlog of its own, so the bound on what waits is theirs together.
ON_LANES = [
    check for check in CHECKS if check not in (overtakes_only_by_priority, keeps_what_waits_where_it_is)
]


@pytest.mark.slow
@pytest.mark.parametrize("check", ON_LANES)
def test_grpc_with_several_lanes(check: Check) -> None:
    check(partial(GrpcTransport, lanes=3))


# Until the shard has heard of the line for replies, those before and after that may come in any order.
@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check is not overtakes_only_by_priority])
def test_zmq_with_replies_apart(check: Check) -> None:
    check(partial(ZmqTransport, apart=True))


# Between processes.

SERVE = """
import sys
from tests.support.conformance import Serving
from hubring.ps.transport.registry import transport

with Serving(transport(sys.argv[1])) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(kind: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that echoes, and its address."""
    command = [sys.executable, "-c", SERVE, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", registry.FASTEST_FIRST)
def test_payloads_cross_processes_and_a_killed_one_is_missed_at_once(kind: str) -> None:
    transport = registry.transport(kind)
    with (
        another_process(kind) as (process, address),
        contextlib.closing(transport.dial(address, PATIENCE)) as line,
    ):
        payload, into = transport.allocate(3 << 20), transport.allocate(3 << 20)
        payload[:] = noise(payload.nbytes)
        reply = ask(line, request(1, payload), into)
        assert content(reply) == bytes(payload)
        assert reply.landed == (kind != "zmq")
        process.kill()
        await_loss(line)


@pytest.mark.slow
def test_shm_maps_nothing_that_has_a_name_on_the_host() -> None:
    transport = ShmTransport()
    with (
        another_process("shm") as (process, address),
        contextlib.closing(transport.dial(address, PATIENCE)) as line,
    ):
        ask(line, request(1, noise(1 << 20)), transport.allocate(1 << 20))
        for pid in (process.pid, os.getpid()):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "memfd:hubring" in maps
            assert "/dev/shm" not in maps


# Shared memory.

LAYOUT = struct.Struct("<IBB6xQQQQQQQ")
LENGTH = LAYOUT.size - 4
NOWHERE = (0, 0, 0)
REQUEST, SEGMENT = 3, 1


@contextlib.contextmanager
def stranger(address: str) -> Iterator[socket.socket]:
    """A socket to a shm listener on which anything can be said."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(PATIENCE)
        line.connect("\0" + address.removeprefix("shm://"))
        yield line


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(b"?", id="shorter than a descriptor"),
        pytest.param(LAYOUT.pack(LENGTH, 1, REQUEST, 0, *NOWHERE, *NOWHERE), id="another version"),
        pytest.param(LAYOUT.pack(LENGTH, VERSION, 99, 0, *NOWHERE, *NOWHERE), id="an unknown kind"),
        pytest.param(LAYOUT.pack(LENGTH, VERSION, REQUEST, 0, 1, 0, 8, *NOWHERE), id="no segment"),
        pytest.param(LAYOUT.pack(LENGTH, VERSION, SEGMENT, 1, *NOWHERE, *NOWHERE), id="no descriptor"),
        pytest.param(bytes(60_000), id="a packet beyond all bounds"),
    ],
)
def test_shm_drops_a_peer_that_breaks_the_rules_and_serves_the_others(packet: bytes) -> None:
    transport = ShmTransport()
    with Serving(transport) as server, contextlib.closing(transport.dial(server.address, PATIENCE)) as honest:
        with stranger(server.address) as line:
            line.send(packet)
            assert line.recv(1) == b""
        assert content(ask(honest, request(1, noise(1000)))) == bytes(noise(1000))


@pytest.mark.parametrize(("offset", "length"), [(4096, 1), (4095, 2), (0, 4097), (2**64 - 1, 2)])
@pytest.mark.parametrize("place", ["payload", "into"])
def test_shm_refuses_places_beyond_the_segment(place: str, offset: int, length: int) -> None:
    places = (1, offset, length, *NOWHERE) if place == "payload" else (*NOWHERE, 1, offset, length)
    with Serving(ShmTransport()) as server, stranger(server.address) as line:
        descriptor = enclose(noise(4096))
        socket.send_fds(line, [LAYOUT.pack(LENGTH, VERSION, SEGMENT, 1, *NOWHERE, *NOWHERE)], [descriptor])
        os.close(descriptor)
        line.send(LAYOUT.pack(LENGTH, VERSION, REQUEST, 0, *places))
        assert line.recv(1) == b""


def test_shm_refuses_a_segment_that_could_shrink() -> None:
    with Serving(ShmTransport()) as server, stranger(server.address) as line:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 4096)
        socket.send_fds(line, [LAYOUT.pack(LENGTH, VERSION, SEGMENT, 1, *NOWHERE, *NOWHERE)], [descriptor])
        os.close(descriptor)
        assert line.recv(1) == b""


def test_shm_forgets_segments_that_nobody_uses() -> None:
    transport = ShmTransport()
    with Serving(transport) as server, contextlib.closing(transport.dial(server.address, PATIENCE)) as line:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(20):
            memory = transport.allocate(200 << 20)  # too large to share a segment with others
            ask(line, request(number, memory[:10]))
        del memory
        # This process plays both ends: two descriptors for the worker's segment, one for the shard's.
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * 3


# gRPC.


def test_grpc_serves_a_client_generated_from_the_proto() -> None:
    with Serving(GrpcTransport()) as server, grpc.insecure_channel(server.address) as channel:
        payload = bytes(noise(CHUNK_BYTES + 10))
        header = pb.Header(request=7, payload_bytes=len(payload), pull=pb.Pull(key=3))
        frames = [pb.Frame(header=header, payload=payload[:100]), pb.Frame(payload=payload[100:])]
        came = list(DataStub(channel).Exchange(iter(frames), timeout=PATIENCE))
        assert came[0].header == header
        assert b"".join(frame.payload for frame in came) == payload


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([pb.Frame(payload=b"x")], id="no header"),
        pytest.param([pb.Frame(header=pb.Header(payload_bytes=1), payload=b"xx")], id="too much payload"),
        pytest.param([pb.Frame(header=pb.Header(payload_bytes=2**62))], id="a size beyond all bounds"),
        pytest.param([pb.Frame(header=pb.Header(payload_bytes=9), payload=b"x")] * 2, id="two at once"),
    ],
)
def test_grpc_ends_a_stream_that_breaks_the_rules_with_a_sentence(frames: list[pb.Frame]) -> None:
    with Serving(GrpcTransport()) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(DataStub(channel).Exchange(iter(frames), timeout=PATIENCE))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details()


class PlainServicer(DataServicer):
    """A shard as anyone may write it from the .proto: once it may read, it answers with all reversed."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.came: list[int] = []

    def Exchange(self, requests: Iterable[pb.Frame], context: Any) -> Iterator[pb.Frame]:  # noqa: N802 - gRPC's
        context.send_initial_metadata((GREETING,))
        assert self.may_read.wait(PATIENCE)
        header, payload = pb.Header(), b""
        for frame in requests:
            if frame.HasField("header"):
                header, payload = frame.header, b""
                self.came.append(header.request)
            payload += frame.payload
            if len(payload) == header.payload_bytes:
                half = len(payload) // 2
                yield pb.Frame(header=header, payload=payload[: half - 1 : -1])
                yield pb.Frame(payload=payload[:half][::-1])

    @classmethod
    @contextlib.contextmanager
    def serving(cls) -> Iterator[tuple[PlainServicer, str]]:
        """A servicer and its address."""
        servicer = cls()
        with futures.ThreadPoolExecutor(8) as threads:
            server = grpc.server(threads, options=[("grpc.max_receive_message_length", -1)])
            add_DataServicer_to_server(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            try:
                yield servicer, f"127.0.0.1:{port}"
            finally:
                server.stop(0).wait()


def test_grpc_talks_on_several_lanes_to_a_servicer_generated_from_the_proto() -> None:
    with PlainServicer.serving() as (servicer, address):
        servicer.may_read.set()
        with contextlib.closing(GrpcTransport(lanes=3).dial(address, PATIENCE)) as line:
            sent = {number: noise(CHUNK_BYTES + 100 + number, number) for number in range(12)}
            for number, payload in sent.items():
                line.send(request(number, payload))
            came = {number_of(reply): content(reply) for reply in replies(line, len(sent))}
    assert came == {number: bytes(payload)[::-1] for number, payload in sent.items()}


def test_grpc_keeps_what_a_busy_shard_cannot_take_and_sends_the_urgent_first() -> None:
    count, urgent = 40, 99
    payload = noise(1 << 20)
    with (
        PlainServicer.serving() as (servicer, address),
        contextlib.closing(GrpcTransport(lanes=1).dial(address, PATIENCE)) as line,
    ):
        for number in range(count):
            line.send(request(number, payload))
        line.send(dataclasses.replace(request(urgent, payload), priority=1))
        servicer.may_read.set()
        replies(line, count + 1)
    assert servicer.came.index(urgent) < count // 2, "gRPC held most of them already"
    servicer.came.remove(urgent)
    assert servicer.came == list(range(count))


def _watch_for_a_pause(monkeypatch: pytest.MonkeyPatch, end: ModuleType) -> threading.Event:
    """An event that is set when a reader at that end finds its backlog full."""
    paused = threading.Event()

    class Watched(Backlog):
        def await_room(self) -> None:
            if self.full:
                paused.set()
            super().await_room()

    monkeypatch.setattr(end, "Backlog", Watched)
    return paused


@pytest.mark.slow
def test_grpc_reads_no_more_from_a_peer_that_does_not_read_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, payload = 1000, noise(128 << 10)
    answered: list[int] = []
    paused = _watch_for_a_pause(monkeypatch, grpc_listener)

    def answer(listener: Listener, envelope: Envelope) -> None:
        number = number_of(envelope.message)
        answered.append(number)
        listener.send(envelope.reply_to, request(number, payload), stable=True)

    with Serving(GrpcTransport(), answer) as server, grpc.insecure_channel(server.address) as channel:
        frames = [pb.Frame(header=pb.Header(request=number)) for number in range(count)]
        came = DataStub(channel).Exchange(iter(frames), timeout=PATIENCE)
        assert paused.wait(PATIENCE)
        assert len(answered) < count
        assert [frame.header.request for frame in came] == answered
    assert sorted(answered) == list(range(count))


@pytest.mark.parametrize("comes_back", [True, False])
def test_grpc_reads_no_more_replies_than_fit_until_its_owner_takes_them(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    count, payload = 2 * BOUND // (4 << 20), noise(4 << 20)
    paused = _watch_for_a_pause(monkeypatch, grpc_client)

    def answer(listener: Listener, envelope: Envelope) -> None:
        listener.send(envelope.reply_to, request(number_of(envelope.message), payload), stable=True)

    with Serving(GrpcTransport(), answer) as server:
        line = GrpcTransport().dial(server.address, PATIENCE)
        with contextlib.closing(line):
            for number in range(count):
                line.send(request(number))
            assert paused.wait(PATIENCE)
            if comes_back:
                first = line.receive()
                assert len(first) < count
                assert len(first) + len(replies(line, count - len(first))) == count


@pytest.mark.parametrize(("shards", "apart"), [(1, True), (2, False)])
def test_zmq_answers_who_has_one_shard_on_a_line_for_replies(shards: int, apart: bool) -> None:
    lines: list[Any] = []

    def answer(listener: Listener, envelope: Envelope) -> None:
        lines.append(envelope.reply_to)
        listener.send(envelope.reply_to, request(number_of(envelope.message)), stable=True)

    with Serving(ZmqTransport(), answer) as server:
        ways = registry.choose([registry.Line("", {"zmq": server.address})] * shards, "zmq")
        with contextlib.closing(ways.dial(0)) as line:
            for number in range(1000):  # requests may overtake the word that the other line is there
                line.send(request(number))
                line.flush()
                assert [number_of(reply) for reply in replies(line, 1)] == [number]
                if lines[-1].endswith(b"<"):
                    break
    assert lines[-1].endswith(b"<") == apart


@pytest.mark.parametrize(("apart", "heard"), [(False, False), (True, True), (True, False)])
def test_zmq_hands_out_long_last_words_before_it_tells_of_the_loss(
    apart: bool, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever line they come on: who has not heard of one for replies answers on the other."""
    for end in ("transport", "listener"):  # however busy the machine is
        monkeypatch.setattr(f"hubring.ps.transport.zmq.{end}.LAST_WORDS_MS", int(1000 * PATIENCE))
    count, payload, answered, heard_of_it = 4, noise(4 << 20), threading.Event(), threading.Event()
    asked: list[Envelope] = []
    hear = ZmqListener._answer_apart

    def hear_or_not(listener: ZmqListener, line: bytes) -> None:
        if heard:
            hear(listener, line)
        heard_of_it.set()

    def answer_all_at_once(listener: Listener, envelope: Envelope) -> None:
        asked.append(envelope)
        for one in asked if len(asked) == count else ():
            listener.send(one.reply_to, request(number_of(one.message), payload), stable=True)
            answered.set()

    monkeypatch.setattr(ZmqListener, "_answer_apart", hear_or_not)
    with (
        Serving(ZmqTransport(), answer_all_at_once) as server,
        contextlib.closing(ZmqTransport(apart=apart).dial(server.address, PATIENCE)) as line,
    ):
        assert not apart or heard_of_it.wait(PATIENCE)
        for number in range(count):
            line.send(request(number))
        line.flush()
        assert answered.wait(PATIENCE)
        ending = threading.Thread(target=server.stop)
        ending.start()
        came = replies(line, count)
        ending.join()
        assert sorted(number_of(reply) for reply in came) == list(range(count))
        await_loss(line)


@pytest.mark.parametrize("apart", [False, True])
def test_zmq_tells_of_a_loss_to_who_only_asked(apart: bool) -> None:
    with Serving(ZmqTransport(), lambda listener, envelope: None) as server:
        line = ZmqTransport(apart=apart).dial(server.address, PATIENCE)
        line.send(request(0))
        line.flush()
    with contextlib.closing(line):
        await_loss(line)


@pytest.mark.parametrize(
    ("host", "room"),
    [
        ("127.0.0.1", zmq_socket.READ_AHEAD_AT_HOME),
        ("::1", zmq_socket.READ_AHEAD_AT_HOME),
        ("10.0.0.1", zmq_socket.READ_AHEAD),
    ],
)
def test_zmq_reads_as_far_ahead_on_all_lines_that_share_a_link(host: str, room: int) -> None:
    sockets = zmq_socket.Sockets()
    for kind in (zmq.ROUTER, zmq.DEALER):
        socket = sockets.open(kind, host)
        assert socket.rcvbuf == room
        sockets.close(socket)


def test_zmq_answers_where_it_was_asked_whoever_had_a_line_for_replies_too_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hubring.ps.transport.zmq.listener.MOST_APART", 2)
    with Serving(ZmqTransport()) as server, contextlib.ExitStack() as stack:
        transport = ZmqTransport(apart=True)
        lines = [transport.dial(server.address, PATIENCE) for _ in range(5)]
        for line in lines:
            stack.callback(line.close)
        for number, line in enumerate(lines):
            line.send(request(number, noise(1 << 20)))
            line.flush()
            assert [number_of(reply) for reply in replies(line, 1)] == [number]


def test_frames_are_what_protobuf_makes_of_them() -> None:
    message = request(300, noise(2 * CHUNK_BYTES + 1))
    first, second, third = (pb.Frame.FromString(frame) for frame in to_frames(message))
    assert first.header.SerializeToString() == message.header
    assert first.payload + second.payload + third.payload == content(message)
    assert not second.HasField("header")
    assert first.SerializeToString() == next(to_frames(message))


@pytest.mark.parametrize(
    "frame", [b"\x0a", b"\x0a\x05ab", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x1a\x00"]
)
def test_bytes_that_are_no_frame_are_refused(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        Assembly().add(frame)


def test_a_service_registered_with_grpc_shares_the_port() -> None:
    def add(server: grpc.Server) -> None:
        def loudly(asked: bytes, context: grpc.ServicerContext) -> bytes:
            return asked + b"!"

        answer: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(loudly)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Ask": answer}),))

    transport = GrpcTransport([add])
    with Serving(transport) as server, grpc.insecure_channel(server.address) as channel:
        ask_it: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/Ask")
        assert ask_it(b"here", timeout=PATIENCE) == b"here!"
        with contextlib.closing(transport.dial(server.address, PATIENCE)) as line:
            assert content(ask(line, request(1, noise(5)))) == bytes(noise(5))


# ZeroMQ.


def test_zmq_ignores_messages_of_the_wrong_form() -> None:
    transport = ZmqTransport()
    with Serving(transport) as server, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(server.address)
        dealer.send_multipart([b"a", b"b", b"c", b"d"])
        dealer.send_multipart([b"header", b"payload"])
        assert dealer.poll(int(1000 * PATIENCE))
        assert dealer.recv_multipart() == [b"header", b"payload"]


def hold(listening: threading.Event, answer: Answer) -> Answer:
    """Serves nobody before the event."""

    def answer_later(listener: Listener, envelope: Envelope) -> None:
        assert listening.wait(PATIENCE)
        answer(listener, envelope)

    return answer_later


def test_zmq_lets_an_urgent_message_overtake_what_waits() -> None:
    transport, listening = ZmqTransport(), threading.Event()
    arrived: list[int] = []

    def note(listener: Listener, envelope: Envelope) -> None:
        arrived.append(number_of(envelope.message))
        echo(listener, envelope)

    with (
        Serving(transport, hold(listening, note)) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
        payload = noise(4 << 20)
        for number in range(32):
            line.send(replace(request(number, payload), priority=number))
            line.flush()
        listening.set()
        replies(line, 32)
    assert arrived.index(31) < 16
    assert arrived[-1] < 16


def test_zmq_lets_an_urgent_reply_overtake_what_waits() -> None:
    transport, payload = ZmqTransport(), noise(4 << 20)
    held: list[Envelope] = []

    def answer_all_at_once(listener: Listener, envelope: Envelope) -> None:
        held.append(envelope)
        for priority, one in enumerate(held if len(held) == 32 else ()):
            reply = replace(request(number_of(one.message), payload), priority=priority)
            listener.send(one.reply_to, reply, stable=True)

    with (
        Serving(transport, answer_all_at_once) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
        for number in range(32):
            line.send(request(number))
        came = [number_of(reply) for reply in replies(line, 32)]
    assert came.index(31) < 16
    assert came[-1] < 16


def test_zmq_reads_from_its_workers_in_turn() -> None:
    """A worker that floods its shard holds up nobody: the other's request is not the last to be read."""
    transport, listening = ZmqTransport(), threading.Event()
    arrived: list[int] = []

    def note(listener: Listener, envelope: Envelope) -> None:
        arrived.append(number_of(envelope.message))
        echo(listener, envelope)

    with (
        Serving(transport, hold(listening, note)) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as flood,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as trickle,
    ):
        payload = noise(1 << 20)
        for number in range(100):
            flood.send(request(number, payload))
        flood.flush()
        trickle.send(request(1000, payload))
        trickle.flush()
        listening.set()
        replies(trickle)
        replies(flood, 100)
    assert arrived.index(1000) < 50


def test_zmq_brings_out_all_replies_before_it_closes() -> None:
    transport, payload, answered = ZmqTransport(), noise(4 << 20), threading.Event()

    def answer(listener: Listener, envelope: Envelope) -> None:
        for number in range(8):
            listener.send(envelope.reply_to, request(number, payload), stable=True)
        answered.set()

    with Serving(transport, answer) as server:
        line = transport.dial(server.address, PATIENCE)
        line.send(request(0))
        line.flush()
        assert answered.wait(PATIENCE)
        closing = threading.Thread(target=server.stop)
        closing.start()
        came = replies(line, 8)
        closing.join(PATIENCE)
    assert [number_of(reply) for reply in came] == list(range(8))
    line.close()


def test_a_connection_is_lost_to_the_last_call() -> None:
    transport = InprocTransport()
    with Serving(transport) as server:
        line = transport.dial(server.address, PATIENCE)
    with pytest.raises(ConnectionLost, match="dial again"):
        line.send(Message(b"header"))
    line.close()
