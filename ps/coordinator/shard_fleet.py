"""The shards of a coordinator, and the calls that go to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ShardControlStub
from hubring.ps.core.bounds import clean_message
from hubring.ps.core.errors import RESTART_JOB, ConfigError, HubringError, JobFailed
from hubring.ps.core.types import View, incarnation_from_wire, incarnation_to_wire
from hubring.ps.job.job import Job
from hubring.ps.job.membership import RETURN_SECONDS
from hubring.ps.security.access import ShardKey
from hubring.ps.security.certificate import Identity
from hubring.ps.transport.grpc.calls import describe
from hubring.ps.transport.grpc.channel import open_async_channel
from hubring.ps.transport.host import ShardAddress

if TYPE_CHECKING:
    from hubring.protos.control_pb2_grpc import ShardControlAsyncStub

_T = TypeVar("_T")

CALL_SECONDS = 10.0
"""How long a shard may take to answer, even with a shorter lease. A call to one that ended fails at once."""
GUARDED_RETURN_SECONDS = 1.5
"""As RETURN_SECONDS, for a shard with a standby. A heartbeat comes each second, and replacing a shard that
lives costs only its standby.
"""
STALLED_LEASE_SECONDS = 2.0
"""As the lease, for a standby that acknowledges nothing while its shard waits: it has missed a heartbeat."""
LOOK_SECONDS = 1.0
"""How long a page or a scrape waits for a shard. A longer wait would make the other shards' numbers old."""
SAVE_SECONDS = 600.0
"""How long a shard may take to reach the step to save, and to write or read its file."""


class ShardSilent(JobFailed):
    """A shard does not answer a call.

    Attributes:
        cause: The message without its fix, for a caller that knows a better one.
        worker: As `ShardState.worker`.
    """

    def __init__(self, cause: str, worker: int = 0) -> None:
        super().__init__(f"{cause}. {RESTART_JOB}")
        self.cause, self.worker = cause, worker


@dataclass(eq=False, repr=False)
class ShardState:
    """What another process needs to know of a shard or a standby."""

    index: int
    token: str
    host: str
    pid: int
    host_id: str
    addresses: dict[str, str]
    key: ShardKey
    worker: int = 0
    """Incarnation of the worker that started the shard; 0 if a server started it."""
    lost: bool = False
    """Whether its lease has expired in a job; the job has failed then."""
    standby: bool = False
    """Whether it waits to take the place of the shard with its number."""
    stream: bytes = b""
    """The secret of the stream between a shard and its standby; empty for a shard without a standby."""
    joining: bytes = b""
    """As `stream`, while a shard's state goes to a standby, which cannot take its place yet."""


class Shard(ShardState):
    """One shard process, as the coordinator knows it.

    Args:
        known: What is known of it.
        channel: A channel to it.
        stub: Its calls.
        heard: When its last heartbeat came.

    Attributes:
        returns_by: When the lease expires, if the shard's connection closed and no heartbeat comes.
        last_stats: The counters in the shard's last answer.
        dismissed: Set once the shard has received the request to exit.
    """

    def __init__(
        self, known: ShardState, channel: grpc.aio.Channel, stub: ShardControlAsyncStub, heard: float
    ) -> None:
        super().__init__(**{each.name: getattr(known, each.name) for each in fields(known)})
        self.channel, self.stub, self.heard = channel, stub, heard
        self.returns_by = math.inf
        self.last_stats = pb.ShardStats()
        self.dismissed = asyncio.Event()

    def __str__(self) -> str:
        whose = f"rank {self.index}'s, " if self.worker else ""  # a worker's shard has the worker's rank
        if self.standby:
            return (
                f"the standby {f'of shard {self.index} ' if self.stream else ''}({self.host} pid {self.pid})"
            )
        return f"shard {self.index} ({whose}{self.host} pid {self.pid})"

    def to_proto(self) -> pb.ShardAddress:
        """Returns where the shard is, and what lets a worker in."""
        return pb.ShardAddress(
            shard=self.index, host_id=self.host_id, addresses=self.addresses, door=self.key.to_proto()
        )


class Fleet:
    """All shards, in the order of their numbers. A call goes to all shards in parallel.

    Args:
        lease_seconds: How long a shard may send no heartbeat.
        identity: The certificate that the coordinator shows to shards; None for none.

    Attributes:
        before_call: Called before each call that changes the shards, and before a ring is notified of them.
        standbys: The processes that wait to take a shard's place.
        guarded: Whether every shard has its standby, or needs none.
        departed: Host and process id of shards and standbys that are no longer needed.
        successor: Waits until a shard that did not answer is replaced; returns None if it is not.
        plan_lock: Locked while a plan is made and goes to the shards.
    """

    def __init__(self, lease_seconds: float, identity: Identity | None = None) -> None:
        self.shards: list[Shard] = []
        self.before_call: Callable[[], None] = lambda: None
        self.standbys: list[Shard] = []
        self.guarded = True
        self.departed: set[tuple[str, int]] = set()
        self.successor: Callable[[Shard], Awaitable[Shard | None]] = _no_successor
        self.plan_lock = asyncio.Lock()
        self._view_lock = asyncio.Lock()
        self.lease_seconds = lease_seconds
        self._identity = identity
        self._call_seconds = max(CALL_SECONDS, lease_seconds)

    @property
    def processes(self) -> tuple[Shard, ...]:
        """The shards and the standbys."""
        return (*self.shards, *self.standbys)

    def find(self, token: str) -> Shard | None:
        """Returns the shard or standby that registered with this token."""
        given = token.encode()
        return next((shard for shard in self.processes if compare_digest(given, shard.token.encode())), None)

    def numbered(self, index: int) -> Shard | None:
        """Returns the shard with this number."""
        return next((shard for shard in self.shards if shard.index == index), None)

    def standby_of(self, shard: Shard) -> Shard | None:
        """Returns the standby that can take a shard's place."""
        return self.standby_with(shard.stream)

    def standby_with(self, stream: bytes) -> Shard | None:
        """Returns the standby to which a stream leads."""
        return next((each for each in self.standbys if stream and each.stream == stream), None)

    def replace(self, shard: Shard, standby: Shard, now: float) -> None:
        """Puts a standby that has just answered in the place of its shard."""
        self.standbys.remove(standby)
        standby.standby, standby.stream, standby.last_stats = False, b"", shard.last_stats
        standby.heard, standby.returns_by = now, math.inf
        self.shards = [standby if each is shard else each for each in self.shards]
        self.departed.add((shard.host, shard.pid))

    def give_up(self, standby: Shard) -> Shard | None:
        """Removes a standby; returns the shard that it followed or joined."""
        self.standbys.remove(standby)
        self.departed.add((standby.host, standby.pid))
        for shard in self.shards:
            if standby.stream and standby.stream in (shard.stream, shard.joining):
                shard.stream = shard.joining = b""
                return shard
        return None

    def register(self, request: pb.RegisterShardRequest, index: int, now: float) -> Shard:
        """Adds a shard with this number, or a standby."""
        known = ShardState(
            index,
            request.token,
            request.host,
            request.pid,
            request.host_id,
            dict(request.addresses),
            ShardKey.from_proto(request.door, self._identity),
            incarnation_from_wire(request.worker),
            standby=request.standby,
        )
        return self.add(known, now)

    def add(self, known: ShardState, now: float) -> Shard:
        """Adds a shard or a standby."""
        self.departed.discard((known.host, known.pid))  # another process has the number now
        address, key = ShardAddress(known.host_id, known.addresses, known.key).way("grpc")
        channel = open_async_channel(address, key.access._replace(secret=known.token))
        shard = Shard(known, channel, ShardControlStub(channel), now)
        if shard.standby:
            self.standbys.append(shard)
        else:
            self.shards = sorted([*self.shards, shard], key=lambda each: each.index)
        return shard

    def beat(self, token: str, now: float) -> bool:
        """Renews a shard's lease; returns False for a lost shard, or one of an earlier server or job."""
        shard = self.find(token)
        if shard is None or shard.lost:
            return False
        shard.heard, shard.returns_by = now, math.inf
        return True

    def disconnect(self, token: str, now: float) -> None:
        """Shortens the lease of a shard whose connection closed, until its next heartbeat."""
        shard = self.find(token)
        if shard is not None:
            seconds = GUARDED_RETURN_SECONDS if shard.stream else RETURN_SECONDS
            shard.returns_by = now + min(seconds, self.lease_seconds)

    def silent(self, now: float) -> list[Shard]:
        """Returns the shards and standbys whose lease has expired."""
        return [shard for shard in self.processes if not self.lives(shard, now)]

    def extend_leases(self, seconds: float, now: float) -> None:
        """Extends all leases by `seconds`: the server could not receive a heartbeat in that time."""
        for shard in self.processes:
            shard.heard = min(now, shard.heard + seconds)
            shard.returns_by += seconds

    async def publish(self, job: Job) -> None:
        """Sends a job's current view to every shard, once; returns when all shards use it.

        Raises:
            JobFailed: A shard does not answer.
        """
        async with self._view_lock:
            assert job.membership is not None
            view = job.membership.view
            if view.epoch > job.published:
                await self.set_view(view)
                job.published = view.epoch

    async def set_view(self, view: View) -> None:
        """Sends the members to every shard; returns when all shards use them."""
        members = [
            pb.Member(rank=member.rank, incarnation=incarnation_to_wire(member.incarnation))
            for member in view.members
        ]
        message = pb.View(epoch=view.epoch, members=members, finished=view.finished)
        await self._all(lambda stub: stub.SetView(message, timeout=self._call_seconds))

    async def set_plan(self, message: pb.ShardAssignment) -> None:
        """Sends every shard its slices, zeroed or restored from a checkpoint."""
        await self._all(lambda stub: stub.SetPlan(message, timeout=SAVE_SECONDS))

    async def drain(self) -> None:
        """Ends the job at the next step boundary."""
        await self._all(lambda stub: stub.Drain(pb.DrainRequest(), timeout=self._call_seconds))

    async def fail(self, error: HubringError) -> None:
        """Makes the shards refuse all waiting and later requests; ignores shards that do not answer."""
        self.before_call()
        message = pb.FailRequest(text=str(error), exit_code=error.exit_code)
        calls = [
            self._one(shard, lambda stub: stub.Fail(message, timeout=self._call_seconds))
            for shard in self.shards
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    async def reset(self) -> None:
        """Clears every shard for the next job."""
        await self._all(lambda stub: stub.Reset(pb.ResetRequest(), timeout=self._call_seconds))

    async def save(self, folder: Path, step: int) -> list[pb.SaveReply]:
        """Lets every shard write its file; `step` -1 saves every key in its current state."""
        message = pb.SaveRequest(directory=os.path.abspath(folder), step=step)
        replies = await self._all(lambda stub: stub.Save(message, timeout=SAVE_SECONDS))
        for reply in replies:
            reply.refused = clean_message(reply.refused)
        return replies

    async def stats(self) -> list[pb.ShardStats]:
        """Returns every shard's counters."""
        return await self._all(lambda stub: stub.Stats(pb.StatsRequest(), timeout=self._call_seconds))

    async def look(self, patience: float) -> list[str]:
        """Updates the `last_stats` of each shard; returns per shard an error, or empty text on success.

        Args:
            patience: Seconds that each shard may take to answer.
        """
        return list(await asyncio.gather(*(self._look(shard, patience) for shard in self.shards)))

    async def dismiss(self, shards: Sequence[Shard]) -> None:
        """Removes these processes; each gets the request to exit with the answer to its next heartbeat."""
        self.shards = [shard for shard in self.shards if shard not in shards]
        self.standbys = [standby for standby in self.standbys if standby not in shards]
        await asyncio.gather(*(shard.channel.close() for shard in shards))

    async def wait_until_told(self, shards: Sequence[Shard], now: float, seconds: float) -> None:
        """Waits until these shards have received the request to exit, with their next heartbeat.

        It skips shards whose lease has expired, and waits at most `seconds`. A shard that misses the
        request exits too, but reports the server as lost.
        """
        hear = [shard.dismissed.wait() for shard in shards if self.lives(shard, now)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*hear), seconds)

    def lives(self, shard: Shard, now: float) -> bool:
        """Returns whether a shard's lease has not expired."""
        return now - shard.heard <= self.lease_seconds and now <= shard.returns_by

    async def _all(self, call: Callable[[ShardControlAsyncStub], Awaitable[_T]]) -> list[_T]:
        self.before_call()
        return list(await asyncio.gather(*(self._one(shard, call) for shard in self.shards)))

    async def _look(self, shard: Shard, patience: float) -> str:
        request = pb.StatsRequest()
        try:
            shard.last_stats = await shard.stub.Stats(request, timeout=patience)
        except grpc.aio.AioRpcError as error:
            return str(_silent(shard, error))
        except asyncio.CancelledError:
            if self._replacement(shard) is None:
                raise
            return f"{shard} was replaced by its standby"
        return ""

    async def _one(self, shard: Shard, call: Callable[[ShardControlAsyncStub], Awaitable[_T]]) -> _T:
        try:
            return await call(shard.stub)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise ConfigError(f"{shard}: {clean_message(error.details() or '')}") from error
            successor = await self.successor(shard)
            if successor is not None:  # no call changes a shard twice
                return await self._one(successor, call)
            raise _silent(shard, error) from error
        except asyncio.CancelledError:
            replacement = self._replacement(shard)
            if replacement is None:
                raise
            return await self._one(replacement, call)

    def _replacement(self, shard: Shard) -> Shard | None:
        """Returns the standby whose promotion cancelled a call to this shard; None if its caller did.

        gRPC cancels the calls of a channel that is closed, and a shard that was frozen may have some.
        """
        task = asyncio.current_task()
        if task is None or task.cancelling():
            return None
        current = self.numbered(shard.index)
        return None if current is shard else current


def _silent(shard: Shard, error: grpc.aio.AioRpcError) -> ShardSilent:
    return ShardSilent(f"{shard} does not answer ({describe(error)})", shard.worker)


async def _no_successor(shard: Shard) -> Shard | None:
    return None
