"""What a closed connection means, and how a coordinator continues after a takeover.

Law: a process that lives and has lost only its connection sends its next heartbeat within RETURN_SECONDS.
One that does not is lost, however long its lease still is. A process has one connection: a new one
replaces the last, whose end then means nothing.

Law: after a takeover, leases start again. A worker or shard that has not reconnected after
RECONNECT_SECONDS is treated as disconnected: it may have ended while there was no coordinator. What the
killed process may have sent in part is sent again: views, a failure, the request to drain, a save.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Literal

from hubring.ps.coordinator.checkpoints import CheckpointSchedule
from hubring.ps.coordinator.promotion import Standbys
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import Fenced
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Sender
from hubring.ps.job.job import Job

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 4.0
"""As long as a client goes on without an answer of its server."""


class HeldConnections:
    """Notes the connections that close.

    Args:
        job: Returns the job.
        fleet: The shards.
        clock: The source of the time.
        done: Set once the server stops.
    """

    def __init__(self, job: Callable[[], Job], fleet: Fleet, clock: TimeSource, done: asyncio.Event) -> None:
        self._job, self._fleet, self._clock, self._done = job, fleet, clock, done
        self._open: dict[Sender | str, asyncio.Task[Literal[True]]] = {}
        """The end of each process's connection, by worker or by the shard's token."""

    async def hold(self, sender: Sender, shard: str) -> None:
        """Holds a call open until the server stops, or until the same process calls again.

        Args:
            sender: The worker that calls.
            shard: The token of the shard that calls; empty if a worker does.

        Raises:
            Fenced: The worker is not a member of the job, or the shard is not registered.
        """
        self._check(sender, shard)
        process, end = shard or sender, asyncio.create_task(self._done.wait())
        replaced, self._open[process] = self._open.get(process), end
        if replaced is not None:
            replaced.cancel()
        try:
            await asyncio.wait([end])
        except asyncio.CancelledError:
            if self._open.get(process) is end:
                self._disconnect(sender, shard)
            raise
        finally:
            end.cancel()
            if self._open.get(process) is end:
                del self._open[process]

    def abandon(self, token: str) -> None:
        """Notes that a worker disconnected while it waited for the job to start."""
        self._job().abandon(token, self._clock.now())

    def expect(self) -> None:
        """Treats each process without a connection as one whose connection closed."""
        for member in self._job().members:
            if member.sender not in self._open:
                self._disconnect(member.sender, "")
        for shard in self._fleet.shards:
            if shard.token not in self._open:
                self._fleet.disconnect(shard.token, self._clock.now())

    def _check(self, sender: Sender, shard: str) -> None:
        if shard and self._fleet.find(shard) is None:
            raise Fenced("this shard is not registered with this server; restart the shard")
        if not shard and sender not in [member.sender for member in self._job().members]:
            raise Fenced(
                f"rank {sender.rank} (join {sender.number}) is not a member of the job;"
                " restart the worker to rejoin"
            )

    def _disconnect(self, sender: Sender, shard: str) -> None:
        if shard:
            self._fleet.disconnect(shard, self._clock.now())
        else:
            self._job().disconnect(sender, self._clock.now())


class Takeover:
    """Continues a coordinator's work.

    Args:
        job: Returns the job.
        standbys: The standbys of shards.
        checkpoints: Takes the job's checkpoints.
        connections: The connections of workers and shards.
        drain: Repeats a request to drain, if there was one.
        clock: The source of the time.

    Attributes:
        failovers: How often a standby took over since the server started.
    """

    def __init__(
        self,
        job: Callable[[], Job],
        standbys: Standbys,
        checkpoints: CheckpointSchedule,
        connections: HeldConnections,
        drain: Callable[[], Coroutine[None, None, None]],
        clock: TimeSource,
    ) -> None:
        self.failovers = 0
        self._job, self._standbys, self._checkpoints = job, standbys, checkpoints
        self._connections, self._drain, self._clock = connections, drain, clock
        self._draining: asyncio.Task[None] | None = None
        self._reconnected_by = math.inf

    def begin(self, *, saving: bool) -> None:
        """Continues, once the coordinator has the state of the process that was killed.

        Args:
            saving: Whether that process was writing a checkpoint.
        """
        self.failovers += 1
        self._reconnected_by = self._clock.now() + RECONNECT_SECONDS
        line = f"the coordinator was lost; its standby has taken over ({self.failovers} in all)"
        log.warning("%s", line)
        self._job().tell(line)
        self._standbys.take_over()
        self._draining = asyncio.create_task(self._drain())
        if saving:
            self._checkpoints.hasten()

    @property
    def recent(self) -> bool:
        """Whether some workers may not have reported their steps yet."""
        return self._reconnected_by < math.inf

    def check(self, now: float) -> None:
        """Notices workers and shards that have not reconnected in time."""
        if now > self._reconnected_by:
            self._reconnected_by = math.inf
            self._connections.expect()
