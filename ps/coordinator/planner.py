"""Agrees with a job's workers on which shard holds which slice of their model.

Law: one plan at a time goes to the shards. The job's plan is settled only once all
shards have it.
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
    """Plans the slices of one job.

    Args:
        job: The job.
        agreed_model: What the workers have agreed on so far.
        fleet: The shards.
        notifier: Where late joiners wait until the other workers have chosen the slices.
        planning: Locked while a plan goes to the shards; shared by the planners of all jobs.
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
        """Makes the first worker's buckets the job's, and compares the other workers' with them.

        Buckets whose indices follow those of the job join it. All workers offer them between the same two
        steps.

        If the workers choose the slices and this call has no `slicing`, only the buckets are agreed
        on and the model stays undecided. A late joiner tries no sizes. While the others try, it gets
        an undecided model and asks again.

        Returns:
            Whether this worker is a late joiner.

        Raises:
            Fenced: The worker is no longer a member.
            ConfigError: The worker's model differs from the job's or the checkpoint's.
            JobFailed: The job has failed.
        """
        late = self._is_late(sender)
        if late:
            await self._notifier.wait_for(lambda: not self._trying or self._job.failure is not None)
            if self._job.failure is not None:
                raise self._job.failure
            # With no first worker left, no worker will choose a size: use the default.
            slicing = None if self._trying else Slicing(SLICE_BYTES)
        async with self._planning:
            self._is_late(sender)  # raises Fenced if the worker lost its rank while it waited
            self._check(offered, late)
            if self._agreed_model.undecided and slicing is None:
                self._agreed_model.expect(offered)
            elif not self._agreed_model.settled or self._agreed_model.extends(offered):
                await self._settle(offered, slicing)
        return late

    async def try_out(self, sender: Sender, offered: Buckets, slice_bytes: int) -> ShardPlan:
        """Sends every shard the slices of a trial, once for all workers that request the same slices.

        Raises:
            Fenced: The worker is no longer a member.
            ConfigError: The job already has its plan.
        """
        async with self._planning:
            self._is_late(sender)
            trial, is_new = self._agreed_model.draw_trial(offered, len(self._fleet.shards), slice_bytes)
            if is_new:
                await self._fleet.set_plan(offered, trial, None)
                self._agreed_model.note_trial(offered, slice_bytes)
        return trial

    def activate(self, sender: Sender) -> int:
        """Makes a late joiner that has its plan active; returns the steps that the others have completed."""
        membership, progress = self._job.membership, self._job.progress
        assert membership is not None
        seen = max(each.step for each in progress.values())
        step = min((progress[rank].step for rank in membership.view.ranks), default=seen)
        membership.activate(sender)
        return step

    def _is_late(self, sender: Sender) -> bool:
        """Returns whether this worker joined after the start and is not active yet; raises `Fenced`."""
        membership = self._job.membership
        if membership is None:
            raise Fenced(f"the job of rank {sender.rank} is over; restart the worker to join the next job")
        return membership.member(sender) not in membership.view.members

    @property
    def _trying(self) -> bool:
        """Whether the job's first workers are still choosing the slices."""
        assert self._job.membership is not None
        return self._agreed_model.undecided and bool(self._job.membership.view.members)

    def _check(self, offered: Buckets, late: bool) -> None:
        """Calls `AgreedModel.check`, and fails the job if its first workers differ."""
        try:
            self._agreed_model.check(offered, late)
        except ConfigError as error:
            if self._agreed_model.buckets and not late:
                self._job.fail(ConfigError(f"the workers differ: {error}"))
            raise

    async def _settle(self, offered: Buckets, slicing: Slicing | None) -> None:
        model = self._agreed_model
        plan, restore = model.draw(offered, len(self._fleet.shards), slicing)
        if model.settled:
            # The worker that offers has all replies to its last step, so some shard has that version.
            version = max((stats.newest for stats in await self._fleet.stats()), default=0)
            await self._fleet.extend_plan(offered, plan, restore, version)
        else:
            await self._fleet.set_plan(offered, plan, restore, model.step)
        model.settle(offered, plan)
        await self._notifier.announce()
