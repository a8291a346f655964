"""A coordinator with fake shards that answer immediately, and its callers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.config.server import ServerConfig
from hubring.ps.coordinator.control_service import Control
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.shard_fleet import Fleet, Shard, ShardState
from hubring.ps.coordinator.status import StatusReporter
from hubring.ps.core.errors import HubringError, JobFailed
from hubring.ps.core.types import (
    PROTOCOL,
    BucketSpec,
    Slice,
    TensorSpec,
    View,
)
from hubring.ps.job.control_messages import SHARD_TOKEN, WORKER_TOKEN, bucket_to_proto
from hubring.ps.security.access import NO_KEY_NEEDED
from hubring.ps.store.consistency import by_name
from tests.support.fakes.clock import FakeTime

LIMIT = 20.0
"""Seconds after which a waiting call is a bug."""

T = TypeVar("T")

BUCKET = BucketSpec(0, "float32", "SGD", (TensorSpec("weight", (4,)),))


def worker_token(name: str) -> str:
    """The token of a worker with a short name."""
    return name.ljust(WORKER_TOKEN, ".")


def shard_token(name: str) -> str:
    """The token of a shard with a short name."""
    return name.ljust(SHARD_TOKEN, ".")


class FakeFleet(Fleet):
    """Shards that carry out and record all requests."""

    def __init__(self, lease_seconds: float) -> None:
        super().__init__(lease_seconds)
        self.views: list[View] = []
        self.plans: list[list[int]] = []
        self.extensions: list[tuple[list[int], str, int]] = []
        """Keys, checkpoint and version."""
        self.failures: list[str] = []
        self.saves: asyncio.Queue[int] = asyncio.Queue()
        self.may_save = asyncio.Event()
        self.may_plan = asyncio.Event()
        self.may_plan.set()
        self.planning = 0
        self.drains = 0
        self.silent_ones = False
        self.used = True
        """Whether the workers have exchanged something."""
        self.versions: Counter[int] = Counter()
        """The progress of each shard's keys."""
        self.apart = 0
        """How many rounds the fastest key of a shard is ahead."""

    def add(self, known: ShardState, now: float) -> Shard:
        none: Any = None
        shard = Shard(known, none, none, float("inf"))
        shard.host, shard.pid, shard.addresses, shard.key = "here", 1, {}, NO_KEY_NEEDED
        self.shards = sorted([*self.shards, shard], key=lambda each: each.index)
        return shard

    async def dismiss(self, shards: Sequence[Shard]) -> None:
        self.shards = [shard for shard in self.shards if shard not in shards]

    async def set_view(self, view: View) -> None:
        if self.shards:
            self.views.append(view)

    async def set_plan(self, message: pb.ShardAssignment) -> None:
        self.planning += 1
        assert self.planning == 1, "one plan at a time"
        await self.may_plan.wait()
        self.planning -= 1
        if message.extends:
            self.extensions.append(
                ([piece.key for piece in message.slices], message.restore, message.version)
            )
        else:
            self.plans.append([piece.numel for piece in message.slices])

    async def drain(self) -> None:
        self.drains += 1

    async def fail(self, error: HubringError) -> None:
        self.failures.append(str(error))

    async def reset(self) -> None:
        """Does nothing."""

    async def save(self, folder: Path, step: int) -> list[pb.SaveReply]:
        self.saves.put_nowait(step)
        await self.may_save.wait()
        path = folder / "shard-0.safetensors"
        path.write_bytes(b"tensors")
        return [pb.SaveReply(file=path.name, sha256=checkpoint_folder.digest(path), bytes=7, keys=[0])]

    async def stats(self) -> list[pb.ShardStats]:
        if self.silent_ones:
            raise JobFailed("shard 0 does not answer")
        return [
            pb.ShardStats(
                shard=each.index,
                oldest=self.versions[each.index],
                newest=self.versions[each.index] + self.apart,
                collectives=int(self.used),
            )
            for each in self.shards
        ]

    async def look(self, patience: float) -> list[str]:
        if self.silent_ones:
            return [f"{shard} does not answer" for shard in self.shards]
        for shard in self.shards:
            shard.last_stats.collectives = int(self.used)
        return [""] * len(self.shards)


class Refused(Exception):
    """Raised by `abort`."""


class FakeContext:
    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Refused(text)


CONTEXT: Any = FakeContext()


class Hub:
    """A coordinator with its clock and its shards."""

    def __init__(self, fleet: Any = None, **settings: Any) -> None:
        self.time = FakeTime()
        config = ServerConfig(**{"workers": 2, "slice_bytes": 64, **settings})
        self.fleet: FakeFleet = fleet or FakeFleet(config.lease)
        restored = checkpoint_folder.newest(config.checkpoint_dir) if config.checkpoint_dir else None
        consistency = by_name(config.mode, config.staleness, config.backup)
        self.coordinator = Coordinator(config, self.fleet, consistency, self.time, restored)
        self.connects = True
        """Whether workers and shards are connected when they join."""
        self.reporter = StatusReporter(self.coordinator, self.time)
        self.control = Control(self.coordinator, self.reporter)

    def connect(self, token: str) -> None:
        if self.connects:
            self.coordinator.connections._open.setdefault(token, asyncio.get_running_loop().create_future())

    async def shard(self, token: str = "s", worker: bytes = b"") -> pb.RegisterShardReply:
        self.connect(shard_token(token))
        request = pb.RegisterShardRequest(
            protocol=PROTOCOL,
            token=shard_token(token),
            worker=worker,
            addresses={"grpc": "127.0.0.1:1"},
            door=pb.Door(certificate=b"a certificate"),
        )
        return await self.control.RegisterShard(request, CONTEXT)

    async def join(self, token: str, **changes: Any) -> pb.JoinReply:
        self.connect(worker_token(token))
        request = {"job": "train.py", "topology": "hub", "rank": -1, **changes}
        asks = pb.JoinRequest(protocol=PROTOCOL, token=worker_token(token), **request)
        return await self.control.Join(asks, CONTEXT)

    async def plan(
        self, joined: pb.JoinReply, bucket: BucketSpec = BUCKET, slice_bytes: int = 0, **changes: Any
    ) -> pb.PlanReply:
        spec = bucket_to_proto(bucket)
        return await self.control.Plan(
            pb.PlanRequest(
                rank=joined.rank,
                incarnation=joined.incarnation,
                buckets=[spec],
                slice_bytes=slice_bytes,
                **changes,
            ),
            CONTEXT,
        )

    async def beat(self, joined: pb.JoinReply, **changes: Any) -> pb.HeartbeatReply:
        request = pb.HeartbeatRequest(rank=joined.rank, incarnation=joined.incarnation, **changes)
        return await self.control.Heartbeat(request, CONTEXT)

    async def leave(
        self, joined: pb.JoinReply, reason: str = "FINISHED", *, heard: bool = False
    ) -> pb.LeaveReply:
        number = pb.LeaveRequest.Reason.Value(reason)
        request = pb.LeaveRequest(
            rank=joined.rank, incarnation=joined.incarnation, reason=number, heard=heard
        )
        return await self.control.Leave(request, CONTEXT)

    async def started(self) -> list[pb.JoinReply]:
        await self.shard()
        return list(await asyncio.gather(self.join("a"), self.join("b")))

    async def tick_after(self, seconds: float) -> None:
        self.time.advance(seconds)
        await self.coordinator.tick()


async def in_training(**settings: Any) -> tuple[Hub, pb.JoinReply, pb.JoinReply]:
    """A hub and its two workers, which have just started."""
    hub = Hub(**settings)
    first, second = await hub.started()
    return hub, first, second


async def opened(hub: Hub, token: str) -> int:
    """Returns how many messages came until the call ended."""
    return len([message async for message in hub.control.Connect(pb.ConnectRequest(token=token), CONTEXT)])


async def disconnect(hub: Hub, token: str) -> None:
    """Opens a connection and closes it, as the end of a process does."""
    call = asyncio.create_task(opened(hub, token))
    await asyncio.sleep(0)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def vanish(hub: Hub, joined: pb.JoinReply) -> None:
    """Closes a worker's connection, as the end of its process does."""
    assert hub.coordinator.job.membership is not None
    (place,) = [one for one in hub.coordinator.job.membership.places if one.member.rank == joined.rank]
    await disconnect(hub, place.token)


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, LIMIT))


def checkpointed(directory: Path, slices: tuple[Slice, ...] = (), step: int = 9) -> None:
    """Writes a checkpoint into the directory."""
    folder = checkpoint_folder.begin(directory)
    checkpoint_folder.publish(folder, Manifest("train.py", "bsp", step, 5, (BUCKET,), slices, ()))


async def ring(size: int = 2) -> tuple[Hub, list[pb.JoinReply]]:
    """A coordinator with a ring and its first generation, to which the last rank came first."""
    hub = Hub(workers=size)
    joins = (hub.join(f"w{rank}", topology="ring", min_workers=1) for rank in range(size))
    members = list(await asyncio.gather(*joins))
    first = await asyncio.gather(*(regroup(hub, member, 0) for member in reversed(members)))
    assert [reply.generation for reply in first] == [1] * size
    return hub, members


async def regroup(
    hub: Hub,
    member: pb.JoinReply,
    generation: int,
    note: str = "",
    *,
    boundary: bool = True,
    wait: float = 10.0,
) -> pb.RegroupReply:
    request = pb.RegroupRequest(
        rank=member.rank,
        incarnation=member.incarnation,
        generation=generation,
        note=note,
        boundary=boundary,
        wait_seconds=wait,
    )
    return await hub.control.Regroup(request, CONTEXT)
