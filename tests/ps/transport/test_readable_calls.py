"""A call whose message was damaged on its way is refused without a traceback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from hubring.ps.core.rejections import Rejections
from hubring.ps.transport.grpc.readable_calls import ReadableCalls

DAMAGED = b"\xff\xff"
SOON = 10.0


class Answering(ControlServicer):
    """Answers each call."""

    async def Clock(self, request: pb.ClockRequest, context: Any) -> pb.ClockReply:  # noqa: N802
        return pb.ClockReply(time_ns=7)

    async def Connect(self, request: pb.ConnectRequest, context: Any) -> AsyncIterator[pb.Ack]:  # noqa: N802
        yield pb.Ack()


def served(ask: Callable[[grpc.aio.Channel], Any]) -> tuple[Any, Rejections]:
    """Returns what a client of such a server gets, and what the server counted."""
    rejections = Rejections()

    async def run() -> Any:
        server = grpc.aio.server(interceptors=[ReadableCalls(rejections)])
        add_ControlServicer_to_server(Answering(), server)  # type: ignore[abstract]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await ask(channel)
        finally:
            await server.stop(0)

    return asyncio.run(run()), rejections


async def one_reply(channel: grpc.aio.Channel, content: bytes) -> Any:
    method: Any = channel.unary_unary("/hubring.v1.Control/Clock")
    return await method(content, timeout=SOON)


async def first_of_many(channel: grpc.aio.Channel, content: bytes) -> Any:
    method: Any = channel.unary_stream("/hubring.v1.Control/Connect")
    return await method(content, timeout=SOON).read()


@pytest.mark.parametrize("call", [one_reply, first_of_many])
def test_a_damaged_call_is_refused_without_a_traceback(
    call: Callable[[grpc.aio.Channel, bytes], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(channel: grpc.aio.Channel) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, DAMAGED)
        return caught.value.code()

    code, rejections = served(ask)
    assert code is grpc.StatusCode.DATA_LOSS
    assert rejections.counts() == {"message": 1}
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == [logging.WARNING]
    assert "its message cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("call", "reply"), [(one_reply, pb.ClockReply(time_ns=7)), (first_of_many, pb.Ack())]
)
def test_a_readable_call_is_answered(
    call: Callable[[grpc.aio.Channel, bytes], Any], reply: pb.ClockReply | pb.Ack
) -> None:
    content, rejections = served(lambda channel: call(channel, b""))
    assert content == reply.SerializeToString()
    assert rejections.counts() == {}
