"""A fleet of shards and standbys that answer as a test says."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.promotion import Standbys
from hubring.ps.coordinator.shard_fleet import Fleet, Shard, ShardState
from hubring.ps.security.access import NO_KEY_NEEDED
from tests.support.fakes.clock import FakeTime


class Stub:
    """Answers all calls, until a test forbids it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lives = True
        self.slow = ""
        """The name of a call that takes until `ends` is set."""
        self.ends = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any, timeout: float) -> pb.Ack:
            if self.lives:
                self.calls.append(name)
                if name == self.slow:
                    await self.ends.wait()
            if not self.lives:
                none: Any = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "gone")
            return pb.Ack()

        return call


class Channel:
    async def close(self) -> None:
        """Does nothing."""


def process(index: int, host: str = "here", *, standby: bool = False) -> Shard:
    pid = index + 100 * standby
    return answering(ShardState(index, f"token {pid}", host, pid, host, {}, NO_KEY_NEEDED, standby=standby))


def answering(known: ShardState) -> Shard:
    channel: Any = Channel()
    stub: Any = Stub()
    return Shard(known, channel, stub, 0.0)


class Story:
    """A fleet of shards, all on one host, and their standbys."""

    def __init__(self, shards: int = 2) -> None:
        self.time = FakeTime()
        self.fleet = Fleet(90.0)
        self.failures: list[str] = []
        self.news: list[str] = []
        self.standbys = Standbys(shards, self.fleet, self.time, self.failures.append, self.news.append)
        self.fleet.shards = [process(index) for index in range(shards)]
        self.fleet.standbys = [process(index, standby=True) for index in range(shards)]
        for each in (*self.fleet.shards, *self.fleet.standbys):
            each.heard = self.time.now()

    def killed(self) -> Story:
        """Returns the story of a coordinator that takes over with what is on record."""
        later = Story(len(self.fleet.shards))
        for kind in ("shards", "standbys"):
            known = [answering(each) for each in getattr(self.fleet, kind)]
            setattr(later.fleet, kind, known)
        later.standbys.take_over()
        return later

    async def joining(self) -> tuple[Shard, Shard, bytes]:
        """Returns shard 0, the standby to which its state is on its way, and the secret of the stream."""
        shard = self.fleet.shards[0]
        stub: Any = shard.stub
        stub.slow = "Replicate"
        await self.standbys.check()
        while "Replicate" not in calls(shard):
            await asyncio.sleep(0)
        (standby,) = [each for each in self.fleet.standbys if each.stream == shard.joining]
        return shard, standby, shard.joining

    async def checked(self) -> None:
        """Returns once every shard has its standby."""
        while not await self.standbys.check():
            await asyncio.sleep(0)

    async def paired(self) -> tuple[Shard, Shard]:
        """Returns shard 0 and its standby."""
        await self.checked()
        standby = self.fleet.standby_of(self.fleet.shards[0])
        assert standby is not None
        return self.fleet.shards[0], standby


def calls(process: Shard) -> list[str]:
    stub: Any = process.stub
    return list(stub.calls)


def kill(process: Shard) -> None:
    stub: Any = process.stub
    stub.lives = False


def gives_up(hub: Story, shard: Shard, stream: bytes, *, unreachable: bool = False) -> bool:
    """Whether a shard that asks about a stream hears that its standby is given up."""
    request = pb.ShardHeartbeatRequest(token=shard.token, stream=stream, unreachable=unreachable)
    return hub.standbys.answer(request).given_up


def dismissal(hub: Story, process: Shard) -> str:
    """Returns why a process must exit; empty if it need not."""
    return hub.standbys.answer(pb.ShardHeartbeatRequest(token=process.token)).dismissed
