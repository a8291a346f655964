"""What a closed connection means.

Law: a process that lives and has lost only its connection sends its next heartbeat within RETURN_SECONDS. One
that does not is lost, however long its lease still is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hubring.ps.coordinator.shard_fleet import Fleet
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

    async def hold(self, sender: Sender, shard: str) -> None:
        """Holds a call open until the server stops.

        Args:
            sender: The worker that calls.
            shard: The token of the shard that calls; empty if a worker does.
        """
        try:
            await self._done.wait()
        except asyncio.CancelledError:
            if shard:
                self._fleet.disconnect(shard, self._clock.now())
            else:
                self._job().disconnect(sender, self._clock.now())
            raise

    def abandon(self, token: str) -> None:
        """Notes that a worker disconnected while it waited for the job to start."""
        self._job().abandon(token, self._clock.now())
