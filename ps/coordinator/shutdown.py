"""How one job ends. Its last worker leaves, it is drained, or it loses a shard.

Law: when the last worker has left, the shards are saved and counted, if all of
them are there. Once one is lost nobody waits for it any more, however far the
saving has come: a host that vanished refuses nothing and never answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from hubring.ps.coordinator import status
from hubring.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import JobFailed
from hubring.ps.job.job import Job

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Shutdown:
    """The end of one job.

    Args:
        job: The one.
        fleet: Its shards.
        checkpoints: Takes its checkpoints.
        colocate: The shards are the workers', and the next job brings others.
    """

    def __init__(self, job: Job, fleet: Fleet, checkpoints: CheckpointSchedule, *, colocate: bool) -> None:
        self.failure: JobFailed | None = None
        """Why no other job can follow: a shard is lost that was the server's own."""
        self._job = job
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._colocate = colocate
        self._lost = asyncio.Event()
        self._told = False

    async def drain(self) -> None:
        """Asks all workers to leave after the same step."""
        self._job.draining = True
        if self._job.topology == "ring":
            return  # its members agree on a step once they hear of it, with their next heartbeat
        try:
            await self._fleet.drain()
        except JobFailed as error:
            self.lose_shard(str(error))

    def lose_shard(self, what: str) -> None:
        """A shard is gone, its parameters too: the job cannot go on, nor a server whose own it was."""
        again = "the job again from its checkpoint"
        if not self._colocate:
            again = "the server again with its --checkpoint-dir, then the workers"
        error = JobFailed(
            f"{what}, at about step {self._job.step}; its part of the parameters is lost: start {again}"
        )
        if not self._colocate and self.failure is None:
            self.failure = error
        self._lost.set()
        self._job.fail(error)

    async def tell_failure(self) -> None:
        """Lets everybody who waits for a shard know that the job has failed, once."""
        if self._job.failure is not None and not self._told:
            self._told = True
            await self._fleet.fail(self._job.failure)

    async def settle(self, *, save: bool) -> list[dict[str, Any]]:
        """Everybody has left; returns what each shard counted, nothing where one is lost.

        Args:
            save: The shards hold parameters, so write a last checkpoint.
        """
        await self._checkpoints.give_up()
        if save:
            await self._unless_lost(self._checkpoints.save_last())
        try:
            return await self._unless_lost(status.shards(self._fleet)) or []
        except JobFailed as error:
            if not self._colocate:
                self.lose_shard(str(error))
            return [{"error": str(error)}]

    async def _unless_lost(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """The work's result; None, and the work is given up, once a shard is lost."""
        if self._lost.is_set():
            work.close()
            return None
        working, loss = asyncio.create_task(work), asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait([working, loss], return_when=asyncio.FIRST_COMPLETED)
            return None if self._lost.is_set() else await working
        finally:
            for task in (working, loss):
                task.cancel()
            await asyncio.wait([working, loss])
