"""Planner: agrees with a job's workers on which shard holds which slice of their model.

Law: one plan at a time goes to the shards, and the plan that the job keeps is settled
only once all of them have taken it.
"""

from __future__ import annotations

import asyncio

from hubring.ps.coordinator.agreed_model import AgreedModel, Buckets
from hubring.ps.coordinator.notifier import Notifier
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import ConfigError, Fenced
from hubring.ps.core.types import Sender, ShardPlan, Slicing
from hubring.ps.job.job import Job
from hubring.ps.job.sharding import SLICE_BYTES


class Planner:
    """One job's.

    Args:
        job: The job.
        agreed_model: What is agreed on so far.
        fleet: The shards.
        notifier: Where late joiners wait until the others have found out how to cut.
        planning: Held while a plan goes to the shards; all jobs' planners have the same one.
    """

    def __init__(
        self, job: Job, agreed_model: AgreedModel, fleet: Fleet, notifier: Notifier, planning: asyncio.Lock
    ) -> None:
        self._job = job
        self._agreed_model = agreed_model
        self._fleet = fleet
        self._notifier = notifier
        self._planning = planning

    async def agree(self, sender: Sender, offered: Buckets, slicing: Slicing | None) -> bool:
        """Takes the first worker's buckets as the job's, and holds the others' against them.

        If the slices are left to the workers and they say nothing, nothing is agreed on but the
        buckets, and the agreed model says so. A late joiner tries no sizes: while the others do, it gets
        that answer and asks again.

        Returns:
            Whether this worker came late.

        Raises:
            Fenced: The worker has lost its place.
            ConfigError: Its model is another than the job's or the checkpoint's.
            JobFailed: The job that it would join has failed.
        """
        late = self._is_late(sender)
        if late:
            await self._notifier.wait_for(lambda: not self._trying or self._job.failure is not None)
            if self._job.failure is not None:
                raise self._job.failure
            # Where none of them is left, nobody finds out a better one.
            slicing = None if self._trying else Slicing(SLICE_BYTES)
        async with self._planning:
            self._is_late(sender)  # or it has lost its place while it waited, and has no say any more
            self._check(offered, late)
            if self._agreed_model.undecided and slicing is None:
                self._agreed_model.expect(offered)
            elif not self._agreed_model.settled:
                await self._settle(offered, slicing)
        return late

    async def try_out(self, sender: Sender, offered: Buckets, slice_bytes: int) -> ShardPlan:
        """Gives every shard the slices that the workers want to try, once for all who ask for the same.

        Raises:
            Fenced: The worker has lost its place.
            ConfigError: The job has its plan already.
        """
        async with self._planning:
            self._is_late(sender)
            trial, is_new = self._agreed_model.draw_trial(offered, len(self._fleet.shards), slice_bytes)
            if is_new:
                await self._fleet.set_plan(offered, trial, None)
        return trial

    def _is_late(self, sender: Sender) -> bool:
        """Whether this worker came after the job's start, and does not count yet; raises `Fenced`."""
        membership = self._job.membership
        if membership is None:
            raise Fenced(f"the job that rank {sender.rank} belonged to is over")
        return membership.member(sender) not in membership.view.members

    @property
    def _trying(self) -> bool:
        """Whether the job's first workers have yet to find out how it is best cut."""
        assert self._job.membership is not None
        return self._agreed_model.undecided and bool(self._job.membership.view.members)

    def _check(self, offered: Buckets, late: bool) -> None:
        """As `AgreedModel.check`; a job whose own workers differ has failed."""
        try:
            self._agreed_model.check(offered, late)
        except ConfigError as error:
            if self._agreed_model.buckets and not late:
                self._job.fail(ConfigError(f"the workers are not alike; one was told: {error}"))
            raise

    async def _settle(self, offered: Buckets, slicing: Slicing | None) -> None:
        plan = self._agreed_model.draw(offered, len(self._fleet.shards), slicing)
        restored = self._agreed_model.restored
        await self._fleet.set_plan(offered, plan, restored[0] if restored else None)
        self._agreed_model.settle(offered, plan)
        await self._notifier.announce()
