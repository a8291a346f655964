"""What the end of a process means: its connection closes, and a standby takes the place of a lost shard.

Law: a process opens its connection before it joins, so there is no moment at which its end goes unnoticed.
One that lives and has lost only its connection calls again within RETURN_SECONDS. One that does not is lost,
however long its lease still is. A process has one connection: a new one replaces the last, whose end then
means nothing.

Law: only `Standbys`, in the coordinator's one loop, decides. A standby joins a shard until it has the
shard's state, and then follows it. If the shard is lost, a standby that follows it is promoted. A standby
that is lost, or that its shard cannot reach, is given up for good, and its shard goes on alone. So is one
that sends no heartbeat while its shard waits for it. Until the shard learns which, it answers no worker.
So at most one process answers for a shard.

Streams are recorded before a shard or a standby gets them. A stream that is not on record, or no
longer, is given up: a coordinator that takes over pairs each standby that was joining again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Literal

import grpc

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.shard_fleet import STALLED_LEASE_SECONDS, Fleet, Shard
from hubring.ps.core.errors import SHARD_REPLACED, STANDBY_GIVEN_UP
from hubring.ps.core.timing import TimeSource
from hubring.ps.job.job import Job
from hubring.ps.transport.grpc.calls import describe


def pair_on_hosts(shards: Sequence[Shard], standbys: Sequence[Shard]) -> list[tuple[Shard, Shard]]:
    """Returns pairs of a shard and a standby, on different hosts where there are enough of them.

    Shards and standbys are sorted by host. If each host has as many of the one as of the other, and none has
    more than half of the shards, moving the standbys by the most on one host separates all pairs.
    """
    if not shards:
        return []
    host = attrgetter("host")
    shards, free = sorted(shards, key=host), sorted(standbys, key=host)
    shift = max(Counter(map(host, shards)).values()) % max(1, len(free))
    free = free[shift:] + free[:shift]
    found: list[tuple[Shard, Shard]] = []
    for apart in (True, False):  # first those that can be on another host
        for shard in [shard for shard in shards if shard not in [one for one, _ in found]]:
            standby = next((each for each in free if not apart or each.host != shard.host), None)
            if standby is not None:
                free.remove(standby)
                found.append((shard, standby))
    return found


log = logging.getLogger(__name__)

STANDBY_CALL_SECONDS = 10.0
TRANSFER_SECONDS = 300.0
"""How long the state of a running job may take to the standby."""
SUCCESSION_SECONDS = 10.0
"""How long a call to a shard waits for the standby to take the shard's place."""
PAIR_SECONDS = 5.0
"""The time between two attempts to pair a shard with a standby."""
_PAUSE = 0.05


class Standbys:
    """The standbys of a coordinator's shards.

    Args:
        wanted: How many standbys a job waits for; 0 without `--standby`.
        fleet: The shards.
        clock: The source of the time.
        fail: Called with the reason if a shard is lost whose parameters no standby has.
        tell: Called with a line for the workers.

    Attributes:
        failovers: How many standbys have taken a shard's place since the server started.
        dismissed: Why shards that were replaced and standbys that were given up must exit, by their tokens.
    """

    def __init__(
        self,
        wanted: int,
        fleet: Fleet,
        clock: TimeSource,
        fail: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.failovers = 0
        self.dismissed: dict[str, str] = {}
        self._wanted = wanted
        self._fleet = fleet
        self._clock = clock
        self._fail = fail
        self._tell = tell
        self._deciding = asyncio.Lock()
        self._pairings: dict[bytes, asyncio.Task[None]] = {}
        """What brings a shard's state to a standby, by the stream's secret."""
        self._pair_at = 0.0
        """When to try again to pair shards with standbys."""
        fleet.successor = self.successor
        fleet.guarded = not wanted

    def begin(self) -> None:
        """Prepares the next job, which waits until every shard has its standby again."""
        self._fleet.guarded = not self._wanted

    def take_over(self) -> None:
        """Ends what a coordinator that was killed had begun: standbys that were joining are free again."""
        for shard in self._fleet.shards:
            shard.joining = b""
        following = [shard.stream for shard in self._fleet.shards]
        for standby in self._fleet.standbys:
            if standby.stream not in following:
                standby.stream = b""

    async def check(self) -> bool:
        """Handles leases that have expired, and begins to pair shards with standbys.

        Returns:
            Whether every shard has its standby since the last call, so that a job can begin.
        """
        for process in self._fleet.silent(self._clock.now()):
            if not self._fleet.lives(process, self._clock.now()):  # unless it has been promoted meanwhile
                silent = self._clock.now() - process.heard
                await self.lose(process, f"sent no heartbeat for {silent:.1f} s")
        for stream in [stream for stream, pairing in self._pairings.items() if pairing.done()]:
            pairing = self._pairings.pop(stream)
            if not pairing.cancelled():
                pairing.result()
        if self._clock.now() >= self._pair_at:
            for shard, standby in self._unpaired():
                self._pair(shard, standby)
        shards, before = self._fleet.shards, self._fleet.guarded
        self._fleet.guarded |= len(shards) >= self._wanted and all(shard.stream for shard in shards)
        return self._fleet.guarded and not before

    async def lose(self, process: Shard, what: str) -> None:
        """Handles the loss of a shard or a standby.

        Args:
            process: The process.
            what: What happened to it, as a clause.
        """
        if process in self._fleet.standbys:
            async with self._deciding:  # a promotion that succeeds makes it a shard
                self._give_up(process, what)
        elif process in self._fleet.shards and not await self._promote(process, what):
            process.lost = True
            self._fail(f"{process} {what}")

    async def child_ended(self, pid: int, name: str, what: str, *, standby: bool) -> None:
        """Handles the end of a child of this server.

        Args:
            pid: Its process id.
            name: Its name.
            what: How it ended, as a clause.
            standby: Whether it was started as a standby. Until it registers, no shard needs it.
        """
        ended = socket.gethostname(), pid
        process = next((each for each in self._fleet.processes if (each.host, each.pid) == ended), None)
        if process is not None:
            await self.lose(process, what)
        elif not standby and ended not in self._fleet.departed:
            self._fail(f"{name} {what}")
        self._fleet.departed.discard(ended)  # the number may be used again

    def answer(self, request: pb.ShardHeartbeatRequest) -> pb.ShardHeartbeatReply:
        """Returns what a shard or a standby learns with its heartbeat, except for whether it stops."""
        shard, stream = self._fleet.find(request.token), request.stream
        if shard is None:
            return pb.ShardHeartbeatReply(dismissed=self.dismissed.get(request.token, ""))
        standby = self._fleet.standby_with(stream)
        if standby is not None and request.unreachable and not self._deciding.locked():
            self._give_up(standby, f"cannot be reached by {shard}")
        elif standby is not None and request.stalled:  # `check` gives it up, unless it is only busy
            standby.returns_by = min(standby.returns_by, standby.heard + STALLED_LEASE_SECONDS)
        given_up = bool(stream) and stream not in (shard.stream, shard.joining)
        departed = [pid for host, pid in self._fleet.departed if host == shard.host]
        return pb.ShardHeartbeatReply(given_up=given_up, departed=departed)

    async def successor(self, shard: Shard) -> Shard | None:
        """Waits until a shard that did not answer a call is replaced; None if it is not."""
        until = self._clock.now() + SUCCESSION_SECONDS
        while (current := self._fleet.numbered(shard.index)) is shard:
            if not shard.stream or self._clock.now() >= until:
                return None
            await asyncio.sleep(_PAUSE)
        return current

    def _unpaired(self) -> list[tuple[Shard, Shard]]:
        """Returns the shards without a standby and their new standbys; before a job only if all get one."""
        alone = [shard for shard in self._fleet.shards if not shard.stream and not shard.joining]
        free = [standby for standby in self._fleet.standbys if not standby.stream]
        waits = not self._fleet.guarded
        if waits and (len(self._fleet.shards) < self._wanted or len(alone) > len(free)):
            return []
        return pair_on_hosts(alone, free)

    def _pair(self, shard: Shard, standby: Shard) -> None:
        """Lets a standby join a shard."""
        stream = secrets.token_bytes(16)
        shard.joining = standby.stream = stream
        standby.index = shard.index
        self._fleet.before_call()
        log.info("%s gets the state of %s", standby, shard)
        self._pairings[stream] = asyncio.create_task(self._join(shard, standby, stream))

    async def _join(self, shard: Shard, standby: Shard, stream: bytes) -> None:
        follow = pb.FollowRequest(shard=shard.index, stream=stream)
        replicate = pb.ReplicateRequest(standby=standby.to_proto(), stream=stream)
        try:
            await standby.stub.Follow(follow, timeout=STANDBY_CALL_SECONDS)
            await shard.stub.Replicate(replicate, timeout=TRANSFER_SECONDS)
        except grpc.aio.AioRpcError as error:
            if shard.joining == stream:
                log.warning("%s cannot follow %s (%s)", standby, shard, describe(error))
                self._pair_at = self._clock.now() + PAIR_SECONDS
                shard.joining = standby.stream = b""
            return
        if shard.joining == stream:  # otherwise the standby was given up, which ends the call too
            shard.stream, shard.joining = stream, b""
            log.info("%s follows %s", standby, shard)

    async def _promote(self, shard: Shard, what: str) -> bool:
        """Returns whether a standby has taken the shard's place."""
        async with self._deciding:
            if shard not in self._fleet.shards:
                return True  # while this call waited
            standby = self._fleet.standby_of(shard)
            if standby is None:
                return False
            self._fleet.before_call()
            try:
                await standby.stub.Promote(pb.PromoteRequest(), timeout=STANDBY_CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                self._give_up(standby, f"does not answer ({describe(error)})")
                return False
            if standby not in self._fleet.standbys:
                return shard not in self._fleet.shards  # both are dismissed if the server ends
            self._fleet.replace(shard, standby, self._clock.now())
        self.dismissed[shard.token] = SHARD_REPLACED
        self.failovers += 1
        line = f"{shard} {what}; its standby ({standby.host} pid {standby.pid}) has taken its place"
        log.warning("%s, and no step is lost", line)
        self._tell(line)
        await shard.channel.close()
        return True

    def _give_up(self, standby: Shard, what: str) -> None:
        """Removes a standby for good, unless it is none any more. Its shard learns it with its heartbeat."""
        if standby not in self._fleet.standbys:
            return
        shard = self._fleet.give_up(standby)
        self.dismissed[standby.token] = STANDBY_GIVEN_UP
        self._fleet.before_call()
        if (pairing := self._pairings.get(standby.stream)) is not None:
            pairing.cancel()
        if shard is None:
            log.warning("%s %s", standby, what)
        else:
            log.warning("%s %s; %s goes on without a standby", standby, what, shard)


class HeldConnections:
    """Notes the connections that open and close.

    Args:
        job: Returns the job.
        fleet: The shards.
        clock: The source of the time.
        done: Set once the server stops.
    """

    def __init__(self, job: Callable[[], Job], fleet: Fleet, clock: TimeSource, done: asyncio.Event) -> None:
        self._job, self._fleet, self._clock, self._done = job, fleet, clock, done
        self._open: dict[str, asyncio.Future[Literal[True]]] = {}
        """The end of each process's connection, by its token."""

    async def hold(self, token: str) -> None:
        """Holds the call of a process open until the server stops, or until the same process calls again."""
        end = asyncio.create_task(self._done.wait())
        replaced, self._open[token] = self._open.get(token), end
        self.note(token)
        if replaced is not None:
            replaced.cancel()
        try:
            await asyncio.wait([end])
        finally:
            end.cancel()
            if self._open.get(token) is end:
                del self._open[token]
                self.note(token)

    def expect(self) -> None:
        """Treats each process without a connection as one whose connection closed."""
        membership = self._job().membership
        for process in (*(membership.places if membership is not None else ()), *self._fleet.shards):
            self.note(process.token)

    def note(self, token: str) -> None:
        """Notes whether a process is connected, where it is a member."""
        membership, connected, now = self._job().membership, token in self._open, self._clock.now()
        if membership is not None:
            membership.connect(token, now, connected=connected)
        if not connected:
            self._fleet.disconnect(token, now)
