"""A peer that sends too much, or opens too much, is refused and delays no other peer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import pytest

from hubring.protos import data_pb2 as pb
from hubring.protos.data_pb2_grpc import DataStub
from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.security.access import Access, ShardKey, ShardLock
from hubring.ps.transport.base import Envelope, Listener, Message, Transport, sealed
from hubring.ps.transport.grpc import listener
from hubring.ps.transport.grpc.listener import (
    CONNECTION_CALLS,
    GREETING,
    MAX_CONTROL_BYTES,
    MAX_STREAMS,
    METHOD,
    SERVICE,
)
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.zmq.socket import MAX_FIRST_PART, MAX_PARTS, PART_BYTES
from hubring.ps.transport.zmq.transport import ZmqTransport
from tests.support.transports.messages import (
    PATIENCE,
    ask,
    await_loss,
    is_echoed,
    number_of,
    replies,
    request,
)
from tests.support.transports.serving import Serving, dealing


def still_serves(transport: Transport, address: str) -> bool:
    with contextlib.closing(transport.dial(address, PATIENCE)) as line:
        return is_echoed(line)


def test_grpc_refuses_a_message_before_it_has_arrived() -> None:
    with Serving(GrpcTransport()) as server, grpc.insecure_channel(server.address) as channel:
        frame = pb.Frame(header=pb.Header(request=1), payload=bytes(MAX_CONTROL_BYTES))
        with pytest.raises(grpc.RpcError) as caught:
            list(DataStub(channel).Exchange(iter([frame]), timeout=PATIENCE))
        assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


def add_a_service(server: grpc.Server) -> None:
    def answered(asked: bytes, context: grpc.ServicerContext) -> bytes:
        return asked

    answer: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answered)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Ask": answer}),))


if TYPE_CHECKING:
    Exchange = grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    Ask = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


async def outcome(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> grpc.StatusCode | None:
    """Returns None for a stream that the listener serves, or the code with which it refused the stream."""
    greeted = GREETING in tuple(await call.initial_metadata())
    return None if greeted else await call.code()


def test_idle_streams_leave_threads_for_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ADDRESS_STREAMS", 8)
    rejections = Rejections()

    async def story(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            exchange: Exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            control: Ask = channel.unary_unary("/test/Ask")
            calls = [exchange(timeout=10 * PATIENCE) for _ in range(CONNECTION_CALLS - 1)]
            outcomes = [await outcome(call) for call in calls]
            assert Counter(outcomes) == {None: 8, grpc.StatusCode.RESOURCE_EXHAUSTED: len(calls) - 8}
            assert await control(b"here", timeout=PATIENCE) == b"here"
            monkeypatch.setattr(listener, "SILENT_SECONDS", 0.0)
            assert await outcome(exchange(timeout=PATIENCE)) is None
            ends = [
                asyncio.create_task(call.code())
                for call, refusal in zip(calls, outcomes, strict=True)
                if refusal is None
            ]
            ended, _ = await asyncio.wait(ends, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            assert [end.result() for end in ended] == [grpc.StatusCode.OK], "one stream made room"

    with Serving(GrpcTransport([add_a_service], rejections=rejections)) as server:
        asyncio.run(story(server.address))
    assert rejections.counts() == {"streams": CONNECTION_CALLS - 9, "silent stream": 1}


@pytest.mark.slow
def test_connections_of_all_streams_leave_room_for_the_coordinator() -> None:
    with Serving(GrpcTransport([add_a_service])) as server, contextlib.ExitStack() as stack:
        host, _, port = server.address.rpartition(":")
        for _ in range(MAX_STREAMS):
            line = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            assert line.recv(1), "the listener has accepted it"
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        control: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/Ask")
        assert control(b"here", timeout=PATIENCE) == b"here"


def test_grpc_refuses_a_stranger_who_never_sends_a_request() -> None:
    rejections = Rejections()
    with (
        Serving(GrpcTransport([add_a_service], rejections=rejections, lock=ShardLock())) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/test/Ask")
        never = threading.Event()
        futures = [call.future(iter(never.wait, True), timeout=PATIENCE) for _ in range(40)]  # type: ignore[arg-type]
        codes = {future.code() for future in futures}
        never.set()
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    assert rejections.counts() == {"token": 40}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        pytest.param([bytes(MAX_FIRST_PART + 1)], "header", id="header"),
        pytest.param([bytes(MAX_FIRST_PART + 1), b"payload"], "header", id="header of two"),
        pytest.param([b"part"] * MAX_PARTS, "parts", id="parts"),
    ],
)
def test_zmq_drops_a_message_that_is_too_large(parts: list[bytes], reason: str) -> None:
    rejections = Rejections()
    transport = ZmqTransport(rejections=rejections)
    with Serving(transport) as server, dealing(server.address) as dealer:
        dealer.send_multipart(parts)
        proper = [sealed(Message(b"header", memoryview(b"payload"))), b"payload"]
        dealer.send_multipart(proper)
        assert dealer.poll(int(1000 * PATIENCE))
        assert dealer.recv_multipart() == proper
        assert rejections.counts() == {reason: 1}
        assert still_serves(transport, server.address)


def raw(address: str, sent: bytes) -> bytes:
    """Sends bytes to a listener, until it closes the connection; returns what came."""
    came = b""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as line, contextlib.suppress(OSError):
        line.sendall(sent)
        while data := line.recv(1 << 16):
            came += data
    return came


@pytest.mark.parametrize("lock", [None, ShardLock()], ids=["open", "locked"])
@pytest.mark.parametrize("flags", [2, 3, 6], ids=["message", "part", "command"])
def test_zmq_closes_a_connection_at_the_length_of_a_part_that_is_too_large(
    flags: int, lock: ShardLock | None
) -> None:
    mechanism = b"NULL" if lock is None else b"PLAIN"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)
    frame = bytes([flags]) + (PART_BYTES + 1).to_bytes(8)
    with Serving(ZmqTransport(lock=lock)) as server:
        assert len(raw(server.address, greeting + frame)) < 1000


def test_zmq_lets_nobody_in_without_the_secret() -> None:
    rejections, lock = Rejections(), ShardLock()
    transport = ZmqTransport(rejections=rejections, lock=lock)
    with Serving(transport) as server:
        for secret in ("", "0" * 64, lock.secret[:-1]):
            with pytest.raises(ServerUnreachable):
                transport.dial(server.address, PATIENCE, ShardKey(Access(secret)))
        assert rejections.counts() == {"token": 2}  # without one there is no common mechanism
        with server.line(lock.key) as line:
            assert is_echoed(line)


def test_shared_memory_has_a_limited_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.transport.shm.listener.MAX_PEERS", 3)
    rejections = Rejections()
    transport = ShmTransport(rejections=rejections)
    with Serving(transport) as server, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(server.line()) for _ in range(4)]
        for line in lines[:3]:
            assert is_echoed(line)
        await_loss(lines[3])
        assert rejections.counts() == {"connections": 1}
        lines[0].close()
        assert still_serves(transport, server.address)


def test_a_shard_stops_reading_a_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.transport.shm.listener.MAX_WAITING", 4)
    answered: list[int] = []

    def answer(listener: Listener, envelope: Envelope) -> None:
        answered.append(number_of(envelope.message))
        listener.send(envelope.reply_to, request(answered[-1], text="x" * 30_000), stable=True)

    with Serving(ShmTransport(), answer) as server, server.line() as line:
        for number in range(200):
            line.send(request(number))
            line.flush()
        before = -1
        while before != len(answered):  # until the shard has stopped
            before = len(answered)
            with server.line() as other:
                assert number_of(ask(other, request(1000))) == 1000
            before += 1
        assert before < 100
        assert sorted(map(number_of, replies(line, 200))) == list(range(200))
