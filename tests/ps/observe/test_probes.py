"""Probes of programs without a token are answered by hub and shard, and block no other call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ShardControlStub
from hubring.ps.core.rejections import Rejections
from hubring.ps.observe import probes
from hubring.ps.observe.health import READY, SERVICE, HubHealth
from hubring.ps.observe.probes import MESSAGE_BYTES, MOST_WAITING, Refused, Turns, Unread, Waiting
from hubring.ps.security.access import Access
from hubring.ps.security.door import lock
from hubring.ps.shard.control_service import ShardControl
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.grpc.channel import open_async_channel, open_channel
from hubring.ps.transport.grpc.listener import CONTROL_THREADS, GrpcListener
from tests.support.fakes.coordinator import run
from tests.support.processes.stopwatch import Stopwatch
from tests.support.transports.http2 import unread_calls

SOON = 10.0
CHECK = f"/{SERVICE}/Check"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MANY = 2 * CONTROL_THREADS - 8
"""Calls on one connection that would take all threads for control."""


def ask(service: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=service)


class Shard:
    """A shard's port, with its lock."""

    def __init__(self) -> None:
        self._lock = lock(tls=True, curve=False)
        control = ShardControl()
        self._listener = GrpcListener("127.0.0.1", [control.add_to], Rejections(), self._lock)
        self._loop = ShardLoop(BSP(), [self._listener])
        control.serve(self._loop, 0)
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()
        self.address = self._listener.address
        self.stranger = open_channel(self.address, Access("", self._lock.door.certificate))
        hub = open_channel(self.address, self._lock.door.for_hub(self._lock.token))
        self._channels = [self.stranger, hub]
        self.hub = ShardControlStub(hub)

    def serves(self) -> None:
        """Answers its coordinator and a probe."""
        self.hub.Reset(pb.ResetRequest(), timeout=SOON)
        self.hub.Stats(pb.StatsRequest(), timeout=SOON)
        assert health_pb2_grpc.HealthStub(self.stranger).Check(ask(), timeout=SOON).status == SERVING

    def end(self) -> None:
        for channel in self._channels:
            channel.close()
        self._loop.stop()
        self._thread.join(SOON)


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard()
    yield shard
    shard.end()


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    code: grpc.StatusCode = refused.value.code()
    return code


def test_a_shard_offers_strangers_no_stream(shard: Shard) -> None:
    watch = health_pb2_grpc.HealthStub(shard.stranger).Watch
    assert code_of(lambda: next(watch(ask(), timeout=SOON))) is grpc.StatusCode.UNIMPLEMENTED
    reflect = reflection_pb2_grpc.ServerReflectionStub(shard.stranger).ServerReflectionInfo
    assert code_of(lambda: next(reflect(iter(()), timeout=SOON))) is grpc.StatusCode.UNIMPLEMENTED


def test_probes_without_a_message_take_no_thread_of_a_shard(shard: Shard) -> None:
    never = threading.Event()
    check: Any = shard.stranger.stream_unary(CHECK)
    calls = [check.future(iter(never.wait, True), timeout=10 * SOON) for _ in range(MANY)]
    shard.serves()
    watch = Stopwatch()
    while sum(call.done() for call in calls) < MANY - MOST_WAITING:
        assert watch.seconds < SOON
        time.sleep(0.01)
    never.set()
    assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.CANCELLED}


def test_replies_that_a_probe_does_not_read_take_no_thread_of_a_shard(shard: Shard) -> None:
    with unread_calls(shard.address, CHECK, b"", MANY, tls=True):
        for _ in range(3):
            shard.serves()


def test_a_probe_has_a_short_message_that_can_be_read(shard: Shard) -> None:
    check: Any = shard.stranger.unary_unary(CHECK)
    for message, code in (
        (ask("x" * MESSAGE_BYTES).SerializeToString(), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (ask("no such").SerializeToString(), grpc.StatusCode.NOT_FOUND),
    ):
        assert code_of(partial(check, message, timeout=SOON)) is code
    none: Any = shard.stranger.stream_unary(CHECK)
    assert code_of(lambda: none(iter(()), timeout=SOON)) is grpc.StatusCode.INVALID_ARGUMENT


class Hub:
    """A hub's health on a port."""

    async def __aenter__(self) -> Hub:
        self.health = HubHealth()
        self.health.tell({READY: "waiting"})
        self._server = grpc.aio.server()
        self.health.add_to(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self.channel = open_async_channel(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self._server.stop(None)

    async def status(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int((await stub.Check(ask(READY), timeout=SOON)).status)


def test_a_hub_offers_strangers_no_stream() -> None:
    async def story() -> None:
        async with Hub() as hub:
            call = health_pb2_grpc.HealthStub(hub.channel).Watch(ask(READY), timeout=SOON)
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED

    run(story())


def test_probes_without_a_message_end_when_others_come() -> None:
    async def story() -> None:
        async with Hub() as hub:
            calls: list[Any] = [hub.channel.stream_unary(CHECK)(timeout=10 * SOON) for _ in range(MANY)]
            codes = asyncio.as_completed([call.code() for call in calls], timeout=SOON)
            for _, code in zip(range(MANY - MOST_WAITING), codes, strict=False):
                assert await code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await hub.status() == NOT_SERVING
            assert sum(call.done() for call in calls) < MANY, "a short call does not wait for them"

    run(story())


def test_an_unread_reply_does_not_keep_an_older_state_up() -> None:
    async def story() -> None:
        async with Hub() as hub:
            with unread_calls(hub.address, CHECK, ask(READY).SerializeToString(), 4, tls=False):
                await unread(hub, 4)
                hub.health.tell({READY: ""})
                assert await hub.status() == SERVING

    run(story())


def test_a_hub_holds_few_unread_replies_of_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ADDRESS_UNREAD", 3)

    async def story() -> None:
        async with Hub() as hub:
            with unread_calls(hub.address, CHECK, ask(READY).SerializeToString(), 10, tls=False):
                await unread(hub, 3)
                with pytest.raises(grpc.aio.AioRpcError, match="earlier probes were not read"):
                    await hub.status()
            await unread(hub, 0)
            assert await hub.status() == NOT_SERVING

    run(story())


async def unread(hub: Hub, count: int) -> None:
    """Waits until so many replies are unread."""
    watch = Stopwatch()
    while hub.health._unread._counts.total() != count:
        assert watch.seconds < SOON
        await asyncio.sleep(0.01)


def test_a_hub_reads_only_short_messages_of_probes() -> None:
    async def story() -> None:
        async with Hub() as hub:
            check: Any = hub.channel.unary_unary(CHECK)
            for message in (bytes(MESSAGE_BYTES + 1), bytes(3 << 20)):
                code = await check(message, timeout=SOON).code()
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await check(b"\xff", timeout=SOON).code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await hub.channel.stream_unary(CHECK)(iter(())).code() is grpc.StatusCode.INVALID_ARGUMENT

    run(story())


def test_the_oldest_of_too_many_probes_ends() -> None:
    waiting, ended = Waiting(), list[int]()
    ends = [lambda number=number: ended.append(number) for number in range(MOST_WAITING + 3)]
    for end in ends[:MOST_WAITING]:
        waiting.enter(end)
    waiting.leave(ends[1])
    assert ended == []
    for end in ends[MOST_WAITING:]:
        waiting.enter(end)
    assert ended == [0, 2]
    waiting.leave(ends[0])


def test_few_probes_have_a_turn_and_none_keeps_it_from_the_next() -> None:
    async def story() -> None:
        waiting, ongoing, most = Waiting(), set[int](), 0
        turns = Turns(waiting)

        async def wait(number: int) -> None:
            nonlocal most
            async with turns.take():
                ended = asyncio.Event()
                waiting.enter(ended.set)
                ongoing.add(number)
                most = max(most, len(ongoing))
                await ended.wait()
                ongoing.remove(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(20)]
        await asyncio.wait_for(asyncio.gather(*tasks[:-MOST_WAITING]), SOON)
        assert ongoing == set(range(20 - MOST_WAITING, 20))
        assert most == MOST_WAITING
        for _ in range(MOST_WAITING):
            waiting.end_oldest()
        await asyncio.gather(*tasks)

    run(story())


def test_unread_replies_are_counted_by_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ADDRESS_UNREAD", 2)
    monkeypatch.setattr(probes, "MOST_UNREAD", 5)
    replies = Unread()
    remove = replies.add("ipv4:10.0.0.1:1000")
    replies.add("ipv6:%5B::ffff:10.0.0.1%5D:1002")
    refuses(replies, "ipv4:10.0.0.1:1001")
    replies.add("ipv6:%5B2001:db8::1%5D:1")
    replies.add("ipv6:%5B2001:db8::ffff:2%5D:1")
    refuses(replies, "ipv6:%5B2001:db8::3%5D:1")
    replies.add("ipv6:%5B2001:db8:0:1::3%5D:1")
    refuses(replies, "ipv4:10.0.0.4:1")  # five in all
    remove(None)
    replies.add("ipv4:10.0.0.1:1001")


def refuses(replies: Unread, peer: str) -> None:
    with pytest.raises(Refused):
        replies.add(peer)
