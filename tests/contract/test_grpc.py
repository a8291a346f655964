"""What is particular to gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from concurrent import futures
from types import ModuleType
from typing import Any

import grpc
import pytest

from hubring.protos import data_pb2 as pb
from hubring.protos.data_pb2_grpc import DataServicer, DataStub, add_DataServicer_to_server
from hubring.ps.core.bounds import Rejections
from hubring.ps.transport.base import MAX_SEALED, Envelope, Listener, Message
from hubring.ps.transport.grpc import listener as grpc_listener
from hubring.ps.transport.grpc import transport as grpc_client
from hubring.ps.transport.grpc.frame import CHUNK_BYTES, MAX_FRAME, Assembly, MalformedFrame, to_frames
from hubring.ps.transport.grpc.listener import GREETING
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.outbox import BOUND, Backlog
from tests.support.transports.messages import (
    PATIENCE,
    content,
    is_echoed,
    noise,
    number_of,
    replies,
    request,
    summed,
)
from tests.support.transports.serving import Serving, answers, connected


def test_grpc_serves_a_client_generated_from_the_proto() -> None:
    options = [("grpc.max_receive_message_length", MAX_FRAME)]
    with Serving(GrpcTransport()) as server, grpc.insecure_channel(server.address, options) as channel:
        payload = bytes(noise(CHUNK_BYTES + 10))
        header = pb.Header(request=7, payload_bytes=len(payload), pull=pb.Pull(key=3))
        header = summed(header, payload)
        frames = [pb.Frame(header=header, payload=payload[:100]), pb.Frame(payload=payload[100:])]
        came = list(DataStub(channel).Exchange(iter(frames), timeout=PATIENCE))
        assert came[0].header == header  # with the same checksums
        assert b"".join(frame.payload for frame in came) == payload


ONE = pb.Frame(header=summed(pb.Header(payload_bytes=9)), payload=b"x")


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([pb.Frame(payload=b"x")], "the first frame of a message has no header"),
        ([pb.Frame(header=summed(pb.Header(payload_bytes=1)), payload=b"xx")], "2 payload bytes; 1 remain"),
        ([pb.Frame(header=summed(pb.Header(payload_bytes=2**62)))], f"a payload of {2**62} bytes"),
        ([pb.Frame(header=pb.Header(request=1))], "does not match its checksum"),
        ([ONE, ONE], "a new message begins before the last payload is complete, at byte 1"),
        ([pb.Frame(header=pb.Header(request=1), payload=bytes(MAX_FRAME))], f"the maximum is {MAX_FRAME}"),
        ([pb.Frame(header=summed(pb.Header(codec="x" * MAX_SEALED)))], f"bytes; the maximum is {MAX_SEALED}"),
    ],
)
def test_grpc_ends_a_stream_that_breaks_the_rules_with_a_sentence(frames: list[pb.Frame], says: str) -> None:
    rejections = Rejections()
    transport = GrpcTransport(rejections=rejections)
    with Serving(transport) as server:
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
            list(DataStub(channel).Exchange(iter(frames), timeout=PATIENCE))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert says in str(caught.value.details())
        assert rejections.counts() == {"frame": 1}
        with server.line() as line:
            assert is_echoed(line)


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
                yield pb.Frame(header=summed(header, payload[::-1]), payload=payload[: half - 1 : -1])
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
        answered.append(number_of(envelope.message))
        answers(payload)(listener, envelope)

    with Serving(GrpcTransport(), answer) as server, grpc.insecure_channel(server.address) as channel:
        frames = [pb.Frame(header=summed(pb.Header(request=number))) for number in range(count)]
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
    with connected(GrpcTransport, answers(payload)) as (_, line):
        for number in range(count):
            line.send(request(number))
        assert paused.wait(PATIENCE)
        if comes_back:
            first = line.receive()
            assert len(first) < count
            assert len(first) + len(replies(line, count - len(first))) == count


def test_frames_are_what_protobuf_makes_of_them() -> None:
    message = request(300, noise(2 * CHUNK_BYTES + 1))
    first, second, third = (pb.Frame.FromString(frame) for frame in to_frames(message))
    assert first.header == summed(pb.Header.FromString(message.header), content(message))
    assert first.payload + second.payload + third.payload == content(message)
    assert not second.HasField("header")


@pytest.mark.parametrize("number", [3, 300, 2**15, 2**22])
def test_the_first_payload_of_a_message_is_aligned_whatever_the_length_of_its_header(number: int) -> None:
    message = request(number, noise(100))
    frame = next(to_frames(message))
    assert frame.index(content(message)) % 4 == 0
    assert pb.Frame.FromString(frame).payload == content(message)


def test_the_length_of_a_header_has_at_most_five_bytes() -> None:
    for length in range(1 << 14, (1 << 14) + 4):
        frame = next(to_frames(Message(bytes(length), noise(100))))
        assert next(at for at, byte in enumerate(frame) if at and byte < 0x80) <= 5


@pytest.mark.parametrize(
    "frame", [b"\x0a", b"\x0a\x05ab", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x1a\x00"]
)
def test_bytes_that_are_no_frame_are_refused(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        Assembly().add(frame)
