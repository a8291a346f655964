"""What a closed connection means.

Law: a process that lives and has lost only its connection sends its next heartbeat within RETURN_SECONDS. One
that does not is lost, however long its lease still is. A process has one connection: a new one replaces the
last, whose end then means nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import Fenced
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Sender
from hubring.ps.job.job import Job


class Connections:
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
