"""The coordinator's hold on its shards: who they are, and what all of them are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from protos import control_pb2 as pb
from protos.control_pb2_grpc import ShardControlStub
from ps.errors import ConfigError, JobFailed
from ps.plans import bucket_to_proto, slice_to_proto
from ps.transport.channel import open_async_channel
from ps.types import BucketSpec, ShardPlan, View

if TYPE_CHECKING:
    from protos.control_pb2_grpc import ShardControlAsyncStub

_T = TypeVar("_T")

CALL_SECONDS = 10.0
SAVE_SECONDS = 600.0
"""How long a shard may take to reach the step that is saved, and to write or read its file."""


@dataclass(slots=True)
class Shard:
    """One shard process, as the coordinator knows it."""

    index: int
    token: str
    host: str
    pid: int
    host_id: str
    addresses: dict[str, str]
    channel: grpc.aio.Channel
    heard: float

    def __str__(self) -> str:
        return f"shard {self.index} ({self.host} pid {self.pid})"


class Fleet:
    """All shards; every call goes to each of them side by side.

    Args:
        expected: How many shards must be there before a job may begin.
        lease_seconds: How long a shard may be silent.
    """

    def __init__(self, expected: int, lease_seconds: float) -> None:
        self.shards: list[Shard] = []
        self.expected = expected
        self.lease_seconds = lease_seconds

    @property
    def ready(self) -> bool:
        return len(self.shards) >= self.expected

    def register(self, request: pb.RegisterShardRequest, now: float) -> Shard:
        """Takes a shard in; the same token is the same shard."""
        for shard in self.shards:
            if shard.token == request.token:
                return shard
        shard = Shard(
            index=len(self.shards),
            token=request.token,
            host=request.host,
            pid=request.pid,
            host_id=request.host_id,
            addresses=dict(request.addresses),
            channel=open_async_channel(request.addresses["grpc"]),
            heard=now,
        )
        self.shards.append(shard)
        return shard

    def beat(self, index: int, token: str, now: float) -> None:
        """Renews a shard's lease.

        Raises:
            ConfigError: We never took this shard in: it belonged to an earlier server.
        """
        if index >= len(self.shards) or self.shards[index].token != token:
            raise ConfigError(f"shard {index} is not one of this server's")
        self.shards[index].heard = now

    def silent(self, now: float) -> Shard | None:
        """Some shard whose lease has run out."""
        return next((shard for shard in self.shards if now - shard.heard > self.lease_seconds), None)

    async def set_view(self, view: View) -> None:
        """Tells every shard who takes part; returns when all of them act on it."""
        members = [
            pb.Member(rank=member.rank, incarnation=member.incarnation, host=member.host, pid=member.pid)
            for member in view.members
        ]
        message = pb.View(epoch=view.epoch, members=members)
        await self._all(lambda stub: stub.SetView(message, timeout=CALL_SECONDS))

    async def set_plan(self, buckets: Sequence[BucketSpec], plan: ShardPlan, restore: Path | None) -> None:
        """Gives every shard its slices, empty or from a checkpoint."""
        message = pb.ShardAssignment(
            buckets=[bucket_to_proto(bucket) for bucket in buckets],
            slices=[slice_to_proto(piece) for piece in plan.slices],
            restore=str(restore or ""),
        )
        await self._all(lambda stub: stub.SetPlan(message, timeout=SAVE_SECONDS))

    async def drain(self) -> None:
        """Asks for the end at the next step boundary."""
        await self._all(lambda stub: stub.Drain(pb.DrainRequest(), timeout=CALL_SECONDS))

    async def fail(self, text: str) -> None:
        """Refuses everything that workers wait for; shards that are gone cannot be told."""
        message = pb.FailRequest(text=text)
        calls = [
            self._one(shard, lambda stub: stub.Fail(message, timeout=CALL_SECONDS)) for shard in self.shards
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    async def reset(self) -> None:
        """Makes room for the next job."""
        await self._all(lambda stub: stub.Reset(pb.ResetRequest(), timeout=CALL_SECONDS))

    async def save(self, folder: Path, step: int) -> list[pb.SaveReply]:
        """Lets every shard write its file; `step` -1 takes every key as it is."""
        message = pb.SaveRequest(directory=str(folder), step=step)
        return await self._all(lambda stub: stub.Save(message, timeout=SAVE_SECONDS))

    async def stats(self) -> list[pb.ShardStats]:
        """Every shard's counters."""
        return await self._all(lambda stub: stub.Stats(pb.StatsRequest(), timeout=CALL_SECONDS))

    async def close(self) -> None:
        """Closes the channels."""
        await asyncio.gather(*(shard.channel.close() for shard in self.shards))

    async def _all(self, call: Callable[[ShardControlAsyncStub], Awaitable[_T]]) -> list[_T]:
        return list(await asyncio.gather(*(self._one(shard, call) for shard in self.shards)))

    async def _one(self, shard: Shard, call: Callable[[ShardControlAsyncStub], Awaitable[_T]]) -> _T:
        try:
            return await call(ShardControlStub(shard.channel))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise ConfigError(f"{shard}: {error.details()}") from error
            raise JobFailed(
                f"{shard} does not answer ({error.code().name}: {error.details()}); its part of the"
                " parameters is out of reach: start the server again with its --checkpoint-dir"
            ) from error
