"""The end of one job: its last worker leaves, it is drained, or it loses a shard.

Law: when the last worker has left, the shards are saved and their counters read, if
no shard is lost. The loss of a shard cancels these calls at any point: a host that
is gone refuses no connection and never answers. What all shards must hear is sent by
a task of this object: a caller that disconnects ends nothing. The next job begins
once that task has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from hubring.ps.coordinator import status
from hubring.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from hubring.ps.coordinator.shard_fleet import Fleet, ShardSilent
from hubring.ps.core.errors import RESTART_ALL, RESTART_JOB, JobFailed
from hubring.ps.job.job import Job

log = logging.getLogger(__name__)

_T = TypeVar("_T")

TURN_SECONDS = 1.0
"""How often leases are checked while a job ends."""


class Shutdown:
    """Ends one job.

    Args:
        job: The job.
        fleet: Its shards.
        checkpoints: Takes its checkpoints.
        colocate: Whether the workers start the shards. The next job's workers then start new ones.
    """

    def __init__(self, job: Job, fleet: Fleet, checkpoints: CheckpointSchedule, *, colocate: bool) -> None:
        self.failure: JobFailed | None = None
        """Why no other job can follow: the server has lost one of its own shards."""
        self._job = job
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._colocate = colocate
        self._lost = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._failing: asyncio.Task[None] | None = None

    async def drain(self) -> None:
        """Makes all workers leave after the same step; returns once all shards know it."""
        self._job.draining = True
        if self._job.topology == "ring":
            self._fleet.before_call()
            return  # the answer to a heartbeat tells its members, which agree on a step
        self._draining = self._draining or asyncio.create_task(self._drain())
        await asyncio.wait([self._draining])
        if not self._draining.cancelled():  # as it is if a shard is lost
            self._draining.result()

    async def _drain(self) -> None:
        try:
            await self._fleet.drain()
        except ShardSilent as error:
            self.lose_shard(error.cause)

    def lose_shard(self, what: str) -> None:
        """Fails the job, whose parameters are lost; also fails the server if the shard was its own.

        Args:
            what: What happened to which shard.
        """
        fix = RESTART_JOB if self._colocate else RESTART_ALL
        error = JobFailed(
            f"{what}, at about step {self._job.step}; its part of the parameters is lost. {fix}"
        )
        if not self._colocate and self.failure is None:
            self.failure = error
        self._lost.set()
        self._job.fail(error)

    async def tell_failure(self) -> None:
        """Sends the job's failure to the shards, once, so that they refuse the waiting workers.

        The caller waits for a slow shard only for a moment.
        """
        if self._job.failure is not None and self._failing is None:
            self._failing = asyncio.create_task(self._fleet.fail(self._job.failure))
            await asyncio.wait([self._failing], timeout=TURN_SECONDS)

    async def settle(self, *, save: bool) -> list[dict[str, Any]]:
        """Ends a job without members; returns the counters of each shard, or none if a shard is lost.

        Args:
            save: Whether to write a last checkpoint, because the shards hold parameters.
        """
        await self._checkpoints.give_up()
        await self._finish_calls()
        if save:
            await self._unless_lost(self._checkpoints.save_last())
        try:
            return await self._unless_lost(status.shards(self._fleet)) or []
        except ShardSilent as error:
            if not self._colocate:
                self.lose_shard(error.cause)
            return [{"error": str(error)}]

    async def _finish_calls(self) -> None:
        """Waits until the shards have heard what they are being told; cancels that once a shard is lost."""
        calls = [call for call in (self._draining, self._failing) if call is not None]
        if calls:
            await self._unless_lost(asyncio.wait(calls))
        for call in calls:
            call.cancel()

    async def _unless_lost(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Returns the work's result; cancels the work and returns None once a shard is lost."""
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
