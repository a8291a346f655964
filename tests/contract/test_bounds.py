"""A peer that sends too much, or opens too much, is refused and delays no other peer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import pytest
import zmq

from hubring.protos import data_pb2 as pb
from hubring.protos.data_pb2_grpc import DataStub
from hubring.ps.core.rejections import Rejections
from hubring.ps.transport.base import Message, Transport
from hubring.ps.transport.checksum import MAX_SEALED, sealed
from hubring.ps.transport.grpc import open_streams
from hubring.ps.transport.grpc.frame import MAX_FRAME
from hubring.ps.transport.grpc.listener import (
    CONNECTION_CALLS,
    GREETING,
    MAX_CONTROL_BYTES,
    METHOD,
    SERVICE,
)
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.zmq.transport import ZmqTransport
from tests.support.transports.messages import PATIENCE, ask, content, noise, request
from tests.support.transports.serving import Serving


def still_serves(transport: Transport, address: str) -> bool:
    with contextlib.closing(transport.dial(address, PATIENCE)) as line:
        return content(ask(line, request(1, noise(5)))) == bytes(noise(5))


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        pytest.param(
            pb.Frame(header=pb.Header(request=1), payload=bytes(MAX_FRAME)), "a frame of", id="frame"
        ),
        pytest.param(pb.Frame(header=pb.Header(codec="x" * MAX_SEALED)), "a header of", id="header"),
    ],
)
def test_grpc_refuses_a_frame_that_is_too_large(frame: pb.Frame, says: str) -> None:
    rejections = Rejections()
    transport = GrpcTransport(rejections=rejections)
    with Serving(transport) as server:
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
            list(DataStub(channel).Exchange(iter([frame]), timeout=PATIENCE))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert says in str(caught.value.details())
        assert rejections.counts() == {"frame": 1}
        assert still_serves(transport, server.address)


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
    monkeypatch.setattr(open_streams, "ADDRESS_STREAMS", 8)
    rejections = Rejections()

    async def story(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            exchange: Exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            control: Ask = channel.unary_unary("/test/Ask")
            calls = [exchange(timeout=10 * PATIENCE) for _ in range(CONNECTION_CALLS - 1)]
            outcomes = [await outcome(call) for call in calls]
            assert Counter(outcomes) == {None: 8, grpc.StatusCode.RESOURCE_EXHAUSTED: len(calls) - 8}
            assert await control(b"here", timeout=PATIENCE) == b"here"
            monkeypatch.setattr(open_streams, "SILENT_SECONDS", 0.0)
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


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        pytest.param([bytes(MAX_SEALED + 1)], "header", id="header"),
        pytest.param([bytes(MAX_SEALED + 1), b"payload"], "header", id="header of two"),
        pytest.param([b"part"] * 1000, "parts", id="parts"),
    ],
)
def test_zmq_drops_a_message_that_is_too_large(parts: list[bytes], reason: str) -> None:
    rejections = Rejections()
    transport = ZmqTransport(rejections=rejections)
    with Serving(transport) as server, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(server.address)
        dealer.send_multipart(parts)
        proper = [sealed(Message(b"header", memoryview(b"payload"))), b"payload"]
        dealer.send_multipart(proper)
        assert dealer.poll(int(1000 * PATIENCE))
        assert dealer.recv_multipart() == proper
        assert rejections.counts() == {reason: 1}
        assert still_serves(transport, server.address)
