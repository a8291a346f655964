"""How workers and shards join one job, what the job needs before it can begin, and the plan of its slices.

Law: a job begins when it has as many shards as it needs. From then on their numbers are 0, 1, 2, ...

Law: the shards know a worker before the worker knows the shards, so that no shard refuses a new worker.

Law: one plan at a time goes to the shards. The job's plan is settled only once all shards have it. Threads
compare models and make plans, because the loop must answer heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint.checkpoint_folder import OF_WORKERS, newest_step
from hubring.ps.config.server import ServerConfig
from hubring.ps.coordinator.agreed_model import AgreedModel, Buckets
from hubring.ps.coordinator.promotion import HeldConnections
from hubring.ps.coordinator.shard_fleet import Fleet, Shard
from hubring.ps.core.errors import ConfigError, Fenced
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Member, Sender, ShardPlan, Slicing, incarnation_from_wire
from hubring.ps.job.control_messages import assignment
from hubring.ps.job.job import Job
from hubring.ps.job.membership import Joiner
from hubring.ps.job.sharding import SLICE_BYTES

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds after which a waiting call answers that it still waits."""


class Notifier:
    """Wakes waiting calls on this loop. Code that changes awaited state must call `announce`."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def wait_for(self, condition: Callable[[], bool], seconds: float = math.inf) -> None:
        """Returns once `condition()` is true, or after `seconds` (at most PATIENCE); the caller checks."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), min(seconds, PATIENCE))
            except TimeoutError:
                return

    async def wait_out(self, condition: Callable[[], bool], seconds: float = math.inf) -> None:
        """Returns once `condition()` is true, or after `seconds`, which may be more than PATIENCE."""
        now = asyncio.get_running_loop().time
        deadline = now() + seconds
        while not condition() and now() < deadline:
            await self.wait_for(condition, deadline - now())

    async def announce(self) -> None:
        """Makes all waiting calls check their conditions."""
        async with self._changed:
            self._changed.notify_all()


class AdmittedWorker(NamedTuple):
    """A worker's membership in a job that has begun; `late` if it joined after the start."""

    member: Member
    world_size: int
    late: bool
    neighbours: int
    """Workers on the same host, including this worker."""


class ShardWanted(NamedTuple):
    """The answer to a worker that must start a shard before it can join."""

    member: Member


JoinAnswer = AdmittedWorker | ShardWanted | None
"""None for a worker that must ask again."""


class Quorum:
    """Counts one job's workers and shards, and lets workers join.

    With `--colocate`, each worker starts a shard on its host, and the worker's rank is the shard's number.
    Until the job begins, a shard is removed together with its worker. The next worker with that rank starts
    another shard.

    Args:
        job: The job.
        fleet: The shards that have joined.
        config: The server's settings: how many shards the job waits for. More can join until it begins.
        notifier: Where workers wait for the others.
        clock: The source of the time.
        connections: Which workers are connected.
    """

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        config: ServerConfig,
        notifier: Notifier,
        clock: TimeSource,
        connections: HeldConnections,
    ) -> None:
        self._job, self._fleet, self._notifier = job, fleet, notifier
        self._clock, self._connections = clock, connections
        self._colocate, self._awaited = config.colocate, config.await_shards
        self._wanted = config.shards + config.await_shards

    async def join(self, joiner: Joiner, patience: float) -> JoinAnswer:
        """Admits a worker; returns None if other workers are still missing after `patience` seconds.

        Raises:
            HubringError: The worker cannot join.
        """
        if joiner.topology == "hub" and not (self._wanted or self._colocate):
            raise ConfigError(
                "this server has no shards, so it only serves a ring; restart it with --shards 1 or more, or"
                " use --topology ring"
            )
        member = self._job.admit(joiner, self._clock.now(), waits=True)
        self._connections.note(joiner.token)  # it may have ended since it called
        if self._job.started:  # earlier joins change nothing that another worker waits for
            await self._notifier.announce()
        if self._job.colocated and not joiner.brings_shard:
            return ShardWanted(member)
        await self._notifier.wait_for(lambda: self.complete, patience)
        if not self.complete:
            return None
        await self._fleet.publish(self._job)
        assert self._job.membership is not None
        self._job.admit(joiner, self._clock.now())  # the same rank; its lease begins now
        late = member not in self._job.membership.view.members
        neighbours = sum(other.host == member.host for other in self._job.members)
        return AdmittedWorker(member, self._job.membership.world_size, late, neighbours)

    async def register(self, request: pb.RegisterShardRequest) -> Shard | None:
        """Adds a shard, once per token; returns None if a job runs without it.

        Raises:
            ConfigError: The job cannot use the shard.
        """
        if (known := self._fleet.find(request.token)) is not None:
            return known
        index = self._number(incarnation_from_wire(request.worker))
        begun = self.complete or (self._job.published and not self._colocate)
        if begun and self.shards_wanted and not request.standby:
            return None  # the job's plan does not include the shard
        shard = self._fleet.register(request, index, self._clock.now())
        self._connections.note(request.token)
        log.info("%s joined (transports: %s)", shard, ", ".join(sorted(shard.addresses)))
        await self._notifier.announce()
        return shard

    def _number(self, worker: int) -> int:
        """Returns a new shard's number; `worker` is the incarnation of the worker that started it, or 0."""
        if not self._colocate:
            return len(self._fleet.shards)
        for member in self._job.members:
            if member.incarnation == worker:
                return member.rank
        raise ConfigError(
            "the worker of this shard has left the job"
            if worker
            else "this server runs with --colocate, so its workers start all shards;"
            " restart it without --colocate to add shards with --join"
        )

    def orphans(self, heard_since: float) -> list[Shard]:
        """Returns the shards to remove from a job that has not begun.

        Args:
            heard_since: A shard with an older last heartbeat has an expired lease.
        """
        present = {member.incarnation for member in self._job.members}
        shards = self._fleet.shards if self._colocate else []
        return [shard for shard in shards if shard.worker not in present or shard.heard < heard_since]

    @property
    def complete(self) -> bool:
        """Whether all workers and shards that the job needs have joined."""
        return self._job.started and not self.shards_missing

    @property
    def shards_wanted(self) -> int:
        """How many shards the job needs before it can begin; a ring needs none."""
        if self._job.topology == "ring":
            return 0
        return self._job.world_size - self._job.spared if self._colocate else self._wanted

    @property
    def shards_missing(self) -> str:
        """How many shards are missing, in words; empty if none are.

        Shards that the server or the workers start are on their way: they import torch.
        """
        missing, wanted = self.shards_wanted - len(self._fleet.shards), self.shards_wanted
        if missing <= 0 and (not wanted or self._fleet.guarded):
            return ""
        what = f"{missing} of" if missing > 0 else "the standbys of"
        return f"{'waiting for' if self._awaited else 'starting'} {what} {wanted} shards"

    def awaited(self, joiner: Joiner) -> str:
        """Returns what a worker that asked to join waits for, and the fix, in words."""
        if self._job.ends_before(joiner):
            return self._job.ending()
        return ". ".join(filter(None, (self.waiting_for(), self._fix(joiner))))

    def waiting_for(self) -> str:
        """Returns what is missing before the job can begin, in words."""
        parts = [self._awaited_shards(), "" if self._job.started else self._job.waiting_for()]
        return "; ".join(filter(None, parts))

    def _fix(self, joiner: Joiner) -> str:
        """Returns what a person can do about it; empty if all are on their way, as a launcher's are."""
        if not self._job.started and not joiner.world_size:
            return "Start them, or restart the server with a smaller --workers"
        if self._awaited and self.shards_missing:
            return "Start them, or restart the server with a smaller --await-shards"
        return ""

    def _awaited_shards(self) -> str:
        """Returns the missing shards; with --colocate none before all workers joined, which start them."""
        shards = self.shards_missing
        if not shards or (self._colocate and not self._job.started):
            return ""
        others = self._awaited
        flag = "" if self._fleet.guarded else " --standby 1"
        return shards + (f" ({others} from other hosts: ps-server start --join ADDR{flag})" if others else "")


class Planner:
    """Plans the slices of one job.

    Args:
        job: The job.
        agreed_model: What the workers have agreed on so far.
        fleet: The shards.
        notifier: Where late joiners wait until the other workers have chosen the slices.
        directory: `--checkpoint-dir`, or None.
    """

    def __init__(
        self, job: Job, agreed_model: AgreedModel, fleet: Fleet, notifier: Notifier, directory: Path | None
    ) -> None:
        self._directory = directory
        self._job = job
        self._agreed_model = agreed_model
        self._fleet = fleet
        self._notifier = notifier

    async def agree(self, sender: Sender, offered: Buckets, slicing: Slicing | None, step: int) -> bool:
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
        late = self.is_late(sender)
        if late:
            await self._notifier.wait_for(lambda: not self._trying or self._job.failure is not None)
            if self._job.failure is not None:
                raise self._job.failure
            # With no first worker left, no worker will choose a size: use the default.
            slicing = None if self._trying else Slicing(SLICE_BYTES)
        async with self._fleet.plan_lock:
            self.is_late(sender)  # raises Fenced if the worker lost its rank while it waited
            if not late and self._agreed_model.turns_to_averaging(offered):
                await self._start_again(sender, offered)
            try:
                await asyncio.to_thread(self._agreed_model.check, offered, late)
            except ConfigError as error:
                if self._agreed_model.buckets and not late:  # the job's first workers differ
                    self._job.fail(ConfigError(f"the workers differ: {error}"))
                raise
            if self._agreed_model.undecided and slicing is None:
                self._agreed_model.expect(offered)
            elif not self._agreed_model.settled or self._agreed_model.extends(offered):
                await self._settle(sender, offered, slicing, step)
        return late

    async def try_out(
        self, sender: Sender, offered: Buckets, slice_bytes: int, number: int
    ) -> tuple[ShardPlan, int]:
        """Sends every shard the slices of a trial, once for all workers that request this number.

        A worker in a lost one's place begins with the first trial, which changes nothing any more.

        Returns:
            The slices, and how many later trials the others have begun.

        Raises:
            Fenced: The worker is no longer a member.
            ConfigError: The job already has its plan.
        """
        async with self._fleet.plan_lock:
            draw, shards = self._agreed_model.draw_trial, len(self._fleet.shards)
            trial, later = await asyncio.to_thread(draw, offered, shards, slice_bytes, number)
            self.is_late(sender)
            if later < 0:
                await self._fleet.set_plan(await asyncio.to_thread(assignment, offered, trial, None))
                self._agreed_model.trial = number
        return trial, max(0, later)

    async def activate(self, sender: Sender, *, gives: bool) -> int | None:
        """Makes a late joiner that has its plan active; returns the steps that the others have completed.

        In the first step of a hub in lockstep, the others show each other means without it, and would wait
        for it there for ever. So it waits until that step has ended; None: it has not ended yet.

        Args:
            sender: The late joiner.
            gives: Whether the others may still need the first parameters from it.
        """
        membership, progress = self._job.membership, self._job.progress
        assert membership is not None

        def may_join() -> bool:
            steps = (self._agreed_model.step, *(each.step for each in progress.values()))
            return max(steps) > 0 or not membership.view.members or self._job.failure is not None

        if self._agreed_model.lockstep and self._agreed_model.on_the_hub and not gives:
            await self._notifier.wait_for(may_join)
            if self._job.failure is not None:
                raise self._job.failure
            if not may_join():
                return None
        seen = max(each.step for each in progress.values())
        step = min((progress[rank].step for rank in membership.view.ranks), default=seen)
        membership.activate(sender)
        return step

    def is_late(self, sender: Sender) -> bool:
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

    async def _start_again(self, sender: Sender, offered: Buckets) -> None:
        """Lets the shards average instead of stepping, if no step was taken."""
        model = self._agreed_model
        if model.restored is None and not any(stats.newest for stats in await self._fleet.stats()):
            model.forget()
            await self._settle(sender, offered, model.slicing, 0)

    async def _settle(self, sender: Sender, offered: Buckets, slicing: Slicing | None, step: int) -> None:
        model, shards = self._agreed_model, len(self._fleet.shards)
        plan, restore = await asyncio.to_thread(model.draw, offered, shards, slicing)
        message = await asyncio.to_thread(assignment, offered, plan, restore)
        self.is_late(sender)  # raises Fenced if the worker lost its rank meanwhile
        message.extends, message.version = model.settled, model.step
        if model.settled:
            # The worker that offers has all replies to its last step, so some shard has that version. It may
            # have pushed the next step's gradients during backward, but not those of the new buckets.
            newest = max((stats.newest for stats in await self._fleet.stats()), default=0)
            message.version = newest - (newest - 1 == step)
        await self._fleet.set_plan(message)
        if not model.settled and model.restored is None and any(bucket.optimizer for bucket in offered):
            await self._warn_of_others()
        model.settle(offered, plan)
        self._job.averages = not model.on_the_hub
        await self._notifier.announce()

    async def _warn_of_others(self) -> None:
        """Warns if the folder has a checkpoint of workers that stepped, as around a ring."""
        folder = self._directory
        step = None if folder is None else await asyncio.to_thread(newest_step, folder / OF_WORKERS)
        if step is not None:
            line = (
                f"training starts at step 0: the checkpoint of step {step} in {folder} is of workers"
                " that step. Start the hub with --mode bsp and pass --checkpoint-dir to ps-worker too, or use"
                " another --checkpoint-dir"
            )
            log.warning("%s", line)
            self._job.tell(line)
