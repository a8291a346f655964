"""Probes of programs without a token are answered by hub and shard, and block no other call."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ShardControlStub
from hubring.ps.core.bounds import Rejections
from hubring.ps.observe import health
from hubring.ps.observe.health import (
    CONNECTION_OPEN,
    MESSAGE_BYTES,
    MOST_WAITING,
    READY,
    SERVICE,
    HubHealth,
    OpenProbes,
    ProbeRefused,
    ProbeTurns,
    WaitingProbes,
)
from hubring.ps.security.access import make_lock
from hubring.ps.shard.control_service import ShardControl
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.grpc.channel import open_channel
from hubring.ps.transport.grpc.listener import CONTROL_THREADS, GrpcListener
from tests.ps.observe.health_hub import SOON, HealthHub, ask
from tests.support.processes.stopwatch import Stopwatch
from tests.support.transports.http2 import deaf_calls, unread_calls

CHECK = f"/{SERVICE}/Check"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MANY = 2 * CONTROL_THREADS - 8
"""Calls on one connection that would take all threads for control."""


class Shard:
    """A shard's port, with its lock."""

    def __init__(self) -> None:
        self._lock = make_lock(tls=True, curve=False)
        control = ShardControl()
        self._listener = GrpcListener("127.0.0.1", [control.add_to], Rejections(), self._lock)
        self._loop = ShardLoop(BSP(), [self._listener])
        control.serve(self._loop, 0)
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()
        self.address = self._listener.address
        self.stranger = open_channel(self.address, self._lock.key.access._replace(secret=""))
        hub = open_channel(self.address, self._lock.key.access._replace(secret=self._lock.token))
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


async def test_a_hub_offers_strangers_no_stream() -> None:
    async with HealthHub() as hub:
        call = health_pb2_grpc.HealthStub(hub.channel).Watch(ask(READY), timeout=SOON)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_probes_without_a_message_end_when_others_come() -> None:
    async with HealthHub() as hub:
        calls: list[Any] = [hub.channel.stream_unary(CHECK)(timeout=10 * SOON) for _ in range(MANY)]
        codes = asyncio.as_completed([call.code() for call in calls], timeout=SOON)
        for _, code in zip(range(MANY - MOST_WAITING), codes, strict=False):
            assert await code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await hub.status(READY) == NOT_SERVING


async def test_a_probe_does_not_wait_for_one_without_a_message() -> None:
    async with HealthHub() as hub:
        call: Any = hub.channel.stream_unary(CHECK)(timeout=10 * SOON)
        await waiting(hub.health._waiting, 1)
        assert await hub.status(READY) == NOT_SERVING
        assert not call.done()


async def waiting(probes: WaitingProbes, count: int) -> None:
    """Waits until so many probes have had their time."""
    watch = Stopwatch()
    while len(probes._ends) != count:
        assert watch.seconds < SOON
        await asyncio.sleep(0.001)


async def test_an_unread_reply_does_not_keep_an_older_state_up() -> None:
    async with HealthHub() as hub:
        with unread_calls(hub.address, CHECK, ask(READY).SerializeToString(), 4, tls=False):
            await open_probes(hub, 4)
            hub.health.tell({READY: ""})
            assert await hub.status(READY) == SERVING


async def test_a_hub_holds_few_unread_replies_of_a_connection_and_answers_others_of_its_address() -> None:
    async with HealthHub() as hub:
        with unread_calls(hub.address, CHECK, ask(READY).SerializeToString(), 30, tls=False):
            await open_probes(hub, CONNECTION_OPEN)
            assert await hub.status(READY) == NOT_SERVING
        await open_probes(hub, 0)


async def open_probes(hub: HealthHub, count: int) -> None:
    """Waits until so many probes are not over."""
    watch = Stopwatch()
    while hub.health._open._counts.total() != count:
        assert watch.seconds < SOON
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("service", ["no such service", READY])
async def test_connections_that_read_nothing_hold_up_no_other_probe(service: str) -> None:
    async with HealthHub() as hub:
        with ExitStack() as stack:
            for _ in range(2 * MOST_WAITING):
                calls = hub.address, CHECK, ask(service).SerializeToString(), 30
                stack.enter_context(await asyncio.to_thread(deaf_calls, *calls, tls=False))
            await open_probes(hub, 2 * MOST_WAITING * CONNECTION_OPEN)
            assert await hub.status(READY) == NOT_SERVING
        await open_probes(hub, 0)


class Deaf:
    """A call whose caller takes no status, and sends a message or not."""

    def __init__(self, message: bytes | None) -> None:
        self._message = message
        self.refused = asyncio.Event()

    def peer(self) -> str:
        return f"ipv4:10.0.0.1:{id(self) % 60000}"

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Does nothing: the call does not end."""

    async def read(self) -> bytes:
        if self._message is None:
            await asyncio.Event().wait()
        return self._message or b""

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.refused.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("message", [b"\xff", bytes(MESSAGE_BYTES + 1), None])
async def test_a_probe_that_cannot_be_refused_has_no_turn(message: bytes | None) -> None:
    health = HubHealth()
    calls = [Deaf(message) for _ in range(3 * MOST_WAITING)]
    serve = health._serve(health._check)
    tasks = [asyncio.create_task(serve(None, call)) for call in calls]
    last = MOST_WAITING if message is None else 0  # which go on waiting for their message
    for call in calls[: len(calls) - last]:
        await asyncio.wait_for(call.refused.wait(), SOON)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_probe_that_cannot_be_refused_keeps_no_message() -> None:
    health = HubHealth()
    message = bytes(MESSAGE_BYTES + 1)
    call = Deaf(message)
    references = sys.getrefcount(message)
    serving = asyncio.create_task(health._serve(health._check)(None, call))
    await call.refused.wait()
    assert sys.getrefcount(message) == references
    serving.cancel()
    await asyncio.wait([serving])


async def test_a_hub_reads_only_short_messages_of_probes() -> None:
    async with HealthHub() as hub:
        check: Any = hub.channel.unary_unary(CHECK)
        for message in (bytes(MESSAGE_BYTES + 1), bytes(3 << 20)):
            code = await check(message, timeout=SOON).code()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await check(b"\xff", timeout=SOON).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await hub.channel.stream_unary(CHECK)(iter(())).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_turn_lasts_at_least_until_there_was_time_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_TURN_SECONDS", 60.0)

    turns, read = ProbeTurns(WaitingProbes()), list[object]()

    async def probe(message: asyncio.Future[object]) -> None:
        async with turns.take():
            await turns.use(message)
            read.append(message.result())

    messages: list[asyncio.Future[object]] = [asyncio.Future() for _ in range(20)]
    tasks = [asyncio.create_task(probe(message)) for message in messages]
    for number, message in enumerate(messages):
        await asyncio.sleep(0)
        message.set_result(number)
    await asyncio.gather(*tasks)
    assert read == list(range(20))


def test_probes_are_counted_by_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CONNECTION_OPEN", 2)
    monkeypatch.setattr(health, "MOST_OPEN", 3)
    ongoing = OpenProbes()
    remove = ongoing.add("ipv4:10.0.0.1:1000")
    ongoing.add("ipv4:10.0.0.1:1000")
    refuses(ongoing, "ipv4:10.0.0.1:1000")
    ongoing.add("ipv4:10.0.0.1:1001")
    refuses(ongoing, "ipv4:10.0.0.4:1")  # three in all
    remove(None)
    ongoing.add("ipv4:10.0.0.1:1000")


def refuses(ongoing: OpenProbes, connection: str) -> None:
    with pytest.raises(ProbeRefused):
        ongoing.add(connection)
