"""The coordinator: one asyncio loop that knows the workers, the shards and the plan.

It moves no gradients and does not import torch. A ring's members find each other
through it too, so that the same two commands start every topology.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.config.server import ServerConfig
from hubring.ps.coordinator.agreed_model import AgreedModel, Buckets
from hubring.ps.coordinator.checkpoints import CheckpointSchedule
from hubring.ps.coordinator.joining import JoinAnswer, Notifier, Planner, Quorum
from hubring.ps.coordinator.promotion import HeldConnections, Standbys
from hubring.ps.coordinator.regroup_service import RegroupService, Rendezvous
from hubring.ps.coordinator.shard_fleet import Fleet, Shard, ShardSilent
from hubring.ps.coordinator.shutdown import TURN_SECONDS, Departures, Shutdown
from hubring.ps.core.errors import ConfigError, HubringError, JobFailed
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Sender, Slicing
from hubring.ps.job.generations import MEETING
from hubring.ps.job.job import Job
from hubring.ps.job.membership import Joiner
from hubring.ps.job.outcome import JobCounters, JobOutcome, JobVerdict, LeaveReason
from hubring.ps.job.telemetry import Telemetry
from hubring.ps.store.consistency import Consistency

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 4.0
"""As long as a client goes on without an answer of its server."""


@dataclass(eq=False, repr=False)
class CoordinatorState:
    """What another process needs to know of a coordinator, besides its parts."""

    next_incarnation: int
    """The incarnation of the next job's first join."""
    began: float
    """Time of the server's start, in monotonic seconds."""
    stopping: bool = False
    """Whether the server exits after this job."""
    judged: bool = False
    """Whether the job is over and has its verdict."""
    last_job: str = ""
    last_step: int = 0
    last_stats: list[dict[str, Any]] = field(default_factory=list)
    outcome: JobOutcome | None = None
    """How the last job ended."""


class Coordinator(CoordinatorState):
    """Leads one job at a time.

    Args:
        config: The server's settings.
        fleet: The shards.
        consistency: The policy that the shards follow.
        clock: The source of the time.
        restored: The checkpoint to resume from, if there is one.
    """

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        consistency: Consistency,
        clock: TimeSource,
        restored: tuple[Path, Manifest] | None,
    ) -> None:
        super().__init__(restored[1].next_incarnation if restored else 1, clock.now())
        self.config, self.fleet, self.consistency = config, fleet, consistency
        self._clock = clock
        wanted = (config.shards + config.await_shards) * config.standby
        self.standbys = Standbys(wanted, self.fleet, clock, self.shard_lost, lambda line: self.job.tell(line))
        self.checkpoints = CheckpointSchedule(
            self.fleet,
            config.checkpoint_dir,
            config.checkpoint_every,
            clock,
            lambda: self.agreed_model.checkpoint_content(self.job),
            restored[0] if restored else None,
        )
        self._turn: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._reconnected_by = math.inf
        """Until when workers and shards may reconnect after a takeover; infinite without one."""
        self.takeovers = 0
        """How often a standby of this process has taken over since the server started."""
        self.done = asyncio.Event()
        """Set when the server should exit: after its only job, or after a failure of the server."""
        self.counters = JobCounters()
        self._notifier = Notifier()
        self.departures = Departures(lambda: self.job, self._notifier, clock, config.patience)
        self.connections = HeldConnections(lambda: self.job, self.fleet, clock, self.done)
        self._begin(restored)

    def _begin(self, restored: tuple[Path, Manifest] | None) -> None:
        """Creates the state of the next job, which resumes from a checkpoint if there is one."""
        config = self.config
        self.job = Job(
            workers=config.workers or None,
            # A job that cannot lose a worker gives the worker more time to recover.
            lease_seconds=config.lease * (1 if config.on_loss == "drop" else 1.5),
            keep_going=config.on_loss == "drop",
            colocate=config.colocate,
            lockstep=self.consistency.lockstep,
            first_incarnation=self.next_incarnation,
        )
        self.agreed_model = AgreedModel(self.consistency, config.mode, config.slice_bytes, restored)
        self.planner = Planner(self.job, self.agreed_model, self.fleet, self._notifier, config.checkpoint_dir)
        self.rendezvous = Rendezvous(self._notifier)
        self.meeting = RegroupService(self.job, self.fleet, self._notifier, self._clock)
        self.quorum = Quorum(self.job, self.fleet, config, self._notifier, self._clock, self.connections)
        self.shutdown = Shutdown(self.job, self.fleet, self.checkpoints, colocate=config.colocate)
        self._ending = self.judged = False
        self.checkpoints.begin()

    # Requests of workers.

    async def join(self, joiner: Joiner) -> JoinAnswer:
        """Admits a worker; returns None while others are missing or the last job ends. It then asks again.

        Raises:
            HubringError: The worker cannot join.
        """
        if self._ends and self._closing:
            raise ConfigError(self.shutdown.too_late())
        if self.stopping:
            raise JobFailed("the server is stopping; restart the server, then restart the worker")
        # A worker that waits here sends no heartbeat: its lease must outlast the wait.
        patience = self.config.lease / 2
        await self._notifier.wait_for(lambda: self._begins_for(joiner), patience)
        return await self.quorum.join(joiner, patience) if self._begins_for(joiner) else None

    def beat(self, sender: Sender, step: int, loss: float, waiting: float, sent: Telemetry) -> list[str]:
        """As `Job.beat`."""
        return self._job_of(sender).beat(sender, step, loss, self._clock.now(), waiting, sent)

    async def leave(self, sender: Sender, reason: LeaveReason, text: str, step: int) -> list[str]:
        """Removes a worker; returns its last news. Leaving twice changes nothing.

        Raises:
            Fenced: The worker lost its place before it left.
        """
        if self.departures.verdict(sender) is not None:
            return []
        news = self._job_of(sender).leave(sender, reason, text, step)
        if reason is LeaveReason.FINISHED:
            self.departures.waiting.add(sender)
        await self._publish_or_fail()
        await self._notifier.announce()
        return news

    def shard_ended(self, sender: Sender, how: str) -> None:
        """Handles a worker's report that its shard exited, before the shard's lease expires."""
        for shard in self.fleet.shards:
            if shard.worker == sender.incarnation:
                self.shard_lost(f"{shard} {how}")

    async def plan(self, sender: Sender, offered: Buckets, slicing: Slicing | None, step: int) -> int | None:
        """Agrees with a worker on its buckets after `step`; returns the steps from which it continues.

        A late joiner becomes active here, because the plan is all it needs. None: it must ask again.
        Raises as `Planner.agree`.
        """
        job, agreed = self._job_of(sender), self.agreed_model

        def ready() -> bool:
            self.planner.is_late(sender)  # raises Fenced if the worker lost its rank while it waits
            return not self.quorum.shards_missing or job.failure is not None

        await self._notifier.wait_out(ready)
        if unplanned := not agreed.settled:
            self.checkpoints.states.clear()
        late = await self.planner.agree(sender, offered, slicing, step)
        if not late or agreed.undecided:
            return None if agreed.undecided else agreed.step
        await self._notifier.wait_out(lambda: self._reconnected_by == math.inf)  # all report their steps
        resumed = await self.planner.activate(sender, gives=unplanned and sender.rank == 0)
        await self.fleet.publish(job)
        return resumed

    def check_member(self, sender: Sender) -> None:
        """Raises Fenced if this worker is not a member of the job."""
        membership = self._job_of(sender).membership
        assert membership is not None
        membership.member(sender)

    # Requests of shards.

    def beat_shard(self, token: str) -> bool:
        """Renews a shard's lease; returns False if the shard must exit."""
        stays = self.fleet.beat(token, self._clock.now()) and not self.done.is_set()
        shard = self.fleet.find(token)
        if shard is not None and not stays:
            shard.dismissed.set()
        return stays

    async def wait_until_told(self, shards: Sequence[Shard], seconds: float) -> None:
        """Waits until finished workers have their verdict, and these shards know that the server exits."""
        await self.departures.wait_until_told(seconds)
        await self.fleet.wait_until_told(shards, self._clock.now(), seconds)

    # Requests of the server's process.

    def extend_leases(self, seconds: float) -> None:
        """Extends all leases after a pause of this process, in which it could not receive heartbeats."""
        log.warning("this server was paused for %.1f s; all leases are extended by that time", seconds)
        now = self._clock.now()
        self.job.extend_leases(seconds, now)
        self.fleet.extend_leases(seconds, now)

    async def tick(self) -> None:
        """Handles leases, failures, checkpoints and the job's end; called a few times a second."""
        try:
            await self._check()
        except JobFailed as error:
            self.shard_lost(error.cause if isinstance(error, ShardSilent) else str(error))

    async def _check(self) -> None:
        now = self._clock.now()
        if now > self._reconnected_by:
            self._reconnected_by = math.inf
            self.connections.expect()
        await self.meeting.note_exchange(now, self.agreed_model, self.rendezvous)
        for lost in self.job.expire(now):
            self.rendezvous.remove(f"{MEETING}/{lost.rank}")  # another worker may take the rank
        if not self.quorum.complete:
            await self.fleet.dismiss(self.quorum.orphans(now - self.config.lease))
        await self.shutdown.spare(now)
        if await self.standbys.check():
            await self._notifier.announce()
        # A task, because a shard that is lost must not block what notices its loss.
        turn = self._turn = self._turn or asyncio.create_task(self._call_shards())
        await asyncio.wait([turn], timeout=TURN_SECONDS)
        if turn.done():
            self._turn = None
            turn.result()

    async def _call_shards(self) -> None:
        """Publishes the members, also after a Leave whose caller disconnected; ends or saves the job."""
        await self._publish_or_fail()
        if self.job.over:
            self._ending = True
            await self._end_job()
        elif self.trains and self.job.step and self.checkpoints.due(self._clock.now()):
            self.checkpoints.save_in_passing()

    def shard_lost(self, what: str) -> None:
        """Fails the job, whose parameters are lost; also fails the server if the shard was its own."""
        self.shutdown.lose_shard(what)
        if self.failure is not None and (self.job.membership is None or self.job.over):
            self.done.set()

    @property
    def failure(self) -> HubringError | None:
        """Why the server cannot continue."""
        return self.shutdown.failure

    async def drain(self) -> None:
        """Lets every worker finish its step and leave; then the server exits."""
        self.stopping = True
        if self.job.membership is None or not self.job.started:
            self.done.set()
        else:
            await self.shutdown.drain()

    def take_over(self, *, saving: bool) -> None:
        """Goes on, once this coordinator has the state of a process that was killed.

        What that process may have sent in part is sent again: views, a failure, the request to drain, a save.
        Leases start again. A worker or shard that has not reconnected after RECONNECT_SECONDS is treated as
        disconnected: it may have ended while there was no coordinator.

        Args:
            saving: Whether that process was writing a checkpoint.
        """
        self.takeovers += 1
        self._reconnected_by = self._clock.now() + RECONNECT_SECONDS
        line = f"the coordinator was lost; its standby has taken over ({self.takeovers} in all)"
        log.warning("%s", line)
        self.job.tell(line)
        self.standbys.take_over()
        if self.stopping or self.job.draining:
            self._draining = asyncio.create_task(self.drain() if self.stopping else self.shutdown.drain())
        if saving:
            self.checkpoints.hasten()

    async def end(self, why: str) -> None:
        """Fails the job at once, even within a step; the server continues as after a failure.

        Raises:
            ConfigError: No job is running.
        """
        if self.job.membership is None or self.job.over:
            raise ConfigError("cannot end the job: no job is running")
        self.job.fail(JobFailed(why))
        await self.shutdown.tell_failure()

    async def stop_with(self, sender: Sender) -> None:
        """Stops all workers after the same step, since one must stop; returns once all shards know it."""
        if not self.job.draining:
            log.warning("rank %d received a stop request; all workers stop after the same step", sender.rank)
        await self.shutdown.drain()

    @property
    def failovers(self) -> int:
        """How many standbys have taken the place of a lost process since the server started."""
        return self.takeovers + self.standbys.failovers

    @property
    def trains(self) -> bool:
        """Whether a job runs whose parameters are on the hub."""
        return self.job.started and self.job.failure is None and self.agreed_model.on_the_hub

    def _begins_for(self, joiner: Joiner) -> bool:
        """Whether no earlier job is ending, whose state is cleared before a worker joins the next one."""
        gone = self.job.membership is not None and self.job.membership.disconnected
        return not self._ends and ((self._closing and not gone) or not self.job.ends_before(joiner))

    @property
    def _ends(self) -> bool:
        return self._ending or self.judged

    def _incarnation_after(self) -> int:
        """Returns a number above every incarnation so far; checkpoints carry it across restarts."""
        membership = self.job.membership
        return self.next_incarnation if membership is None else membership.next_incarnation

    def _job_of(self, sender: Sender) -> Job:
        self.departures.check(sender)
        return self.job

    async def _publish_or_fail(self) -> None:
        """Publishes the members to the shards; sends them the failure first if the job has failed."""
        await self.shutdown.tell_failure()
        try:
            if self.quorum.complete and self.job.failure is None:
                await self.fleet.publish(self.job)
        except JobFailed as error:
            if not (isinstance(error, ShardSilent) and self.shutdown.spares(error.worker)):
                self.job.fail(error)

    async def _end_job(self) -> None:
        """Saves the job after its last worker left; then stops the server or begins the next job."""
        if not (self.judged or self.job.started or self.job.published or self.stopping or self.failure):
            log.info("all workers left before the job started; ready for the next job")
            self.next_incarnation = self._incarnation_after()
            self.counters.leave(self.job.outcome)
            await self.departures.close(self.job, JobVerdict(self.job.name, "no worker started"))
            self._begin(self.agreed_model.restored)
            return
        if not self.judged:
            await self._judge()
        restored = None
        if not self._closing:
            if not self.job.outcome.ok:
                # In a thread: digests of gigabytes take longer than the shards' timeout for heartbeats.
                restored = await asyncio.to_thread(self.checkpoints.newest)
            await self.fleet.reset()
            self.standbys.begin()
        if self._closing:  # may have changed meanwhile
            self.done.set()
            return
        self._begin(restored)
        await self._notifier.announce()
        log.info("ready for the next job")

    async def _judge(self) -> None:
        """Saves the job that is over, and gives its verdict."""
        self.outcome = self.job.outcome
        self.last_stats = await self.shutdown.settle(save=self.agreed_model.on_the_hub)
        if self.config.colocate:
            await self.fleet.dismiss(self.fleet.shards)
        self.last_job, self.last_step = self.job.name, self.job.step
        self.counters.close(self.outcome)
        log.info("job %s is over: %s", self.job.name, self.outcome.summary)
        self.next_incarnation = self._incarnation_after()
        self.judged = True
        await self.departures.close(self.job, self.shutdown.verdict())

    @property
    def _closing(self) -> bool:
        """Whether the server exits after this job."""
        return self.config.once or self.stopping or self.failure is not None
