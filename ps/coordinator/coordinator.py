"""The coordinator: one asyncio loop that knows who takes part and who holds what.

It moves no gradients and does not import torch. It is also where the ring's
members find each other, so that the same two commands start every topology.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.config.server import ServerConfig
from hubring.ps.coordinator import status
from hubring.ps.coordinator.agreed_model import AgreedModel, Buckets
from hubring.ps.coordinator.checkpoint_publisher import Held
from hubring.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from hubring.ps.coordinator.job_counters import JobCounters
from hubring.ps.coordinator.joining import Joining, Seat, Summons
from hubring.ps.coordinator.notifier import Notifier
from hubring.ps.coordinator.planner import Planner
from hubring.ps.coordinator.quorum import Quorum
from hubring.ps.coordinator.rendezvous import Rendezvous
from hubring.ps.coordinator.report import Reporter
from hubring.ps.coordinator.shard_fleet import LOOK_SECONDS, Fleet, Shard
from hubring.ps.coordinator.shard_sources import OwnShards, ShardSources, WorkersShards
from hubring.ps.coordinator.shutdown import Shutdown
from hubring.ps.coordinator.view_publisher import ViewPublisher
from hubring.ps.core.errors import ConfigError, Fenced, HubringError, JobFailed
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Sender, ShardPlan, Slicing
from hubring.ps.job.job import Job, Joiner, Outcome, Reason
from hubring.ps.store.consistency import Consistency

log = logging.getLogger(__name__)

TURN_SECONDS = 1.0
"""How often leases are looked at while a job ends."""


class Coordinator:
    """Leads one job at a time.

    Args:
        config: The server's settings.
        consistency: The policy that the shards follow.
        clock: Where the time comes from.
        restored: The checkpoint to go on from, if there is one.
    """

    def __init__(
        self,
        config: ServerConfig,
        consistency: Consistency,
        clock: TimeSource,
        restored: tuple[Path, Manifest] | None,
    ) -> None:
        self.config = config
        self.consistency = consistency
        self._clock = clock
        self.fleet = Fleet(config.lease)
        self._sources: ShardSources = (
            WorkersShards() if config.colocate else OwnShards(config.shards + config.await_shards)
        )
        self.checkpoints = CheckpointSchedule(
            self.fleet,
            config.checkpoint_dir,
            config.checkpoint_every,
            clock,
            self._held,
            restored[0] if restored else None,
        )
        self.done = asyncio.Event()
        """Set when the server should end: after its only job, or beyond help."""
        self.outcome: Outcome | None = None
        self.stopping = False
        """The server ends with this job."""
        self.last_job = ""
        self.last_step = 0
        self.last_stats: list[dict[str, Any]] = []
        self.counters = JobCounters()
        self._notifier = Notifier()
        self._publishing = asyncio.Lock()
        self._planning = asyncio.Lock()
        self._reporter = Reporter(self, clock.now())
        self._next_incarnation = restored[1].next_incarnation if restored else 1
        self._begin(restored)

    def _begin(self, restored: tuple[Path, Manifest] | None) -> None:
        """Makes room for a job, to go on from a checkpoint if there is one."""
        config = self.config
        self.job = Job(
            workers=config.workers or None,
            # A job that must not lose a worker gives it more time to come back.
            lease_seconds=config.lease * (1 if config.on_loss == "drop" else 1.5),
            keep_going=config.on_loss == "drop",
            colocate=config.colocate,
            first_incarnation=self._next_incarnation,
        )
        self.agreed_model = AgreedModel(self.consistency, config.mode, config.slice_bytes, restored)
        self._planner = Planner(self.job, self.agreed_model, self.fleet, self._notifier, self._planning)
        self.views = ViewPublisher(self.fleet, self._publishing)
        self._rendezvous = Rendezvous(self._notifier)
        self.quorum = Quorum(
            self.job, self.fleet, self._sources, colocate=config.colocate, awaited=config.await_shards
        )
        self._joining = Joining(self.job, self.quorum, self.views, self._notifier, self._clock)
        self._shutdown = Shutdown(self.job, self.fleet, self.checkpoints, colocate=config.colocate)
        self._end: asyncio.Task[None] | None = None
        self.checkpoints.begin()

    # What workers ask for.

    async def join(self, joiner: Joiner) -> Seat | Summons | None:
        """Gives a worker its place; None while others are still missing: it asks again.

        Raises:
            HubringError: The worker cannot take part; says why.
        """
        if self.stopping:
            raise JobFailed("the server is being stopped; start it again, then the worker")
        # A worker that waits here sends no heartbeat: its lease must outlast the wait.
        patience = self.config.lease / 2
        await self._notifier.wait_for(lambda: self._end is None, patience)
        if self._end is not None:  # a job is over and not yet cleared away: its places are nobody's
            return None
        return await self._joining.join(joiner, patience)

    def beat(self, sender: Sender, step: int, loss: float, waiting: float) -> list[str]:
        """Renews a worker's lease; returns the news for it. Raises as `Job.beat`."""
        return self._job_of(sender).beat(sender, step, loss, self._clock.now(), waiting)

    async def leave(self, sender: Sender, reason: Reason, text: str, step: int) -> list[str]:
        """Takes a worker out; returns its last news."""
        if self.job.membership is None:
            return []
        news = self.job.leave(sender, reason, text, step)
        await self._publish_or_fail()
        await self._notifier.announce()
        return news

    async def needs_shard_of(self, sender: Sender, seconds: float) -> str:
        """Who needs the shard of a worker that has left, waited for until it is nobody; then empty."""
        await self._notifier.wait_for(lambda: self.fleet.of_worker(sender.incarnation) is None, seconds)
        if self.fleet.of_worker(sender.incarnation) is None:
            return ""
        return ", ".join(map(str, self.job.members)) or "the last checkpoint"

    def shard_ended(self, sender: Sender, how: str) -> None:
        """A worker tells that its shard is gone, sooner than the shard's lease would."""
        shard = self.fleet.of_worker(sender.incarnation)
        if shard is not None:
            self.shard_lost(f"{shard} {how}")

    async def plan(self, sender: Sender, offered: Buckets, slicing: Slicing | None) -> int:
        """Agrees with a worker on its buckets; returns the completed steps to go on from.

        A late joiner counts once it has the plan, which is all that it needs. Raises as `Planner.agree`.
        """
        job = self._job_of(sender)
        late = await self._planner.agree(sender, offered, slicing)
        if not late or self.agreed_model.undecided:
            return self.agreed_model.step
        membership = job.membership
        assert membership is not None
        seen = max(progress.step for progress in job.progress.values())
        step = min((job.progress[rank].step for rank in membership.view.ranks), default=seen)
        membership.activate(sender)
        await self.views.publish(membership)
        return step

    async def try_plan(self, sender: Sender, offered: Buckets, slice_bytes: int) -> ShardPlan:
        """Gives every shard the slices that the workers want to try. Raises as `Planner.try_out`."""
        return await self._planner.try_out(sender, offered, slice_bytes)

    async def rendezvous(self, sender: Sender, key: str, value: str, seconds: float) -> str:
        """Pins a value to the board, or without one waits for somebody else's; empty if none came."""
        membership = self._job_of(sender).membership
        assert membership is not None
        membership.member(sender)
        if value:
            await self._rendezvous.pin(key, value)
            return value
        return await self._rendezvous.find(key, seconds)

    # What shards ask for.

    async def register_shard(self, request: pb.RegisterShardRequest) -> Shard | None:
        """Takes a shard in, the same one for the same token; None while a job runs without it.

        Raises:
            ConfigError: This hub has no use for it.
        """
        known = self.fleet.find(request.token)
        if known is not None:
            return known
        index = self._sources.number(request.worker, self.job, self.fleet.shards)
        if self.quorum.complete and self.quorum.shards_wanted:
            return None  # the job's plan knows nothing of it
        shard = self.fleet.register(request, index, self._clock.now())
        log.info("%s joined, by %s", shard, ", ".join(sorted(shard.addresses)))
        await self._notifier.announce()
        return shard

    def beat_shard(self, token: str) -> bool:
        """Renews a shard's lease; False where it should end."""
        stays = self.fleet.beat(token, self._clock.now()) and not self.done.is_set()
        shard = self.fleet.find(token)
        if shard is not None and not stays:
            shard.dismissed.set()
        return stays

    async def see_off(self, shards: Sequence[Shard], seconds: float) -> None:
        """Waits until these shards have heard of the server's end; as `Fleet.see_off`."""
        await self.fleet.see_off(shards, self._clock.now(), seconds)

    # What the server's process asks for.

    def excuse(self, seconds: float) -> None:
        """This process was held up: what it did not hear meanwhile counts against nobody."""
        log.warning("this server was held up for %.1f s; leases go on from where they were", seconds)
        now = self._clock.now()
        self.job.excuse(seconds, now)
        self.fleet.excuse(seconds, now)

    async def tick(self) -> None:
        """Looks after leases, failures, checkpoints and the job's end; called a few times a second."""
        try:
            await self._look_after()
        except JobFailed as error:
            self.shard_lost(str(error))

    async def _look_after(self) -> None:
        now = self._clock.now()
        self.job.expire(now)
        if not self.quorum.complete:
            leases_from = now - self.config.lease
            await self.fleet.dismiss(self._sources.orphans(self.job, self.fleet.shards, leases_from))
        silent = self.fleet.silent(now)
        if silent is not None:
            self.shard_lost(f"{silent} sent no heartbeat for {now - silent.heard:.1f} s")
        # Also what a Leave did not bring about whose caller hung up in the middle.
        await self._publish_or_fail()
        if self.job.over:
            await self._end_beside()
        elif self.trains and self.checkpoints.due(now):
            self.checkpoints.save_in_passing()

    def shard_lost(self, what: str) -> None:
        """A shard is gone, its parameters too: the job cannot go on, nor a server whose own it was."""
        self._shutdown.lose_shard(what)
        if self.failure is not None and (self.job.membership is None or self.job.over):
            self.done.set()

    @property
    def failure(self) -> HubringError | None:
        """Why the server cannot go on."""
        return self._shutdown.failure

    async def drain(self) -> None:
        """Lets every worker finish its step and leave; then the server ends."""
        self.stopping = True
        if self.job.membership is None or not self.job.started:
            self.done.set()
        else:
            await self._shutdown.drain()

    async def save(self) -> tuple[Path, int]:
        """Writes a checkpoint now; returns its folder and its step. Raises as `CheckpointSchedule.save`."""
        return await self.checkpoints.save()

    async def end(self, why: str) -> None:
        """Ends the job for everyone, in the midst of a step; the server goes on as after a failure.

        Raises:
            ConfigError: There is none to end.
        """
        if self.job.membership is None or self.job.over:
            raise ConfigError("no job is running: there is none to end")
        self.job.fail(JobFailed(why))
        await self._shutdown.tell_failure()

    async def stop_with(self, sender: Sender) -> None:
        """A worker was asked to stop and cannot or shall not leave alone: all stop after the same step."""
        if not self.job.draining:
            assert self.job.membership is not None
            log.warning("%s was asked to stop: all workers stop with it", self.job.membership.member(sender))
            await self._shutdown.drain()

    async def status(self, patience: float = LOOK_SECONDS) -> dict[str, Any]:
        """The server as one JSON object: job, workers, shards, who waits for whom. Waits as `shards`."""
        return self.report(await self.shards(patience))

    async def shards(self, patience: float = LOOK_SECONDS) -> list[dict[str, Any]]:
        """What every shard counts, with an `error` where one does not tell.

        Args:
            patience: Seconds for which one that does not answer is waited for.
        """
        return await status.shards_now(self.fleet, patience)

    def report(self, shards: list[dict[str, Any]]) -> dict[str, Any]:
        """The status, with the shards as they were last heard of."""
        return self._reporter.status(shards, self._clock.now())

    def troubles(self) -> dict[str, str]:
        """For each service by its name in grpc.health.v1, why it cannot be used; empty where it can."""
        return self._reporter.troubles(self._clock.now())

    def waiting_for(self) -> str:
        """Who is missing, as a sentence."""
        return self.quorum.waiting_for()

    @property
    def trains(self) -> bool:
        """Whether a job runs whose parameters are the hub's to keep."""
        return self.job.started and self.job.failure is None and self.agreed_model.on_the_hub

    # Inside.

    def _incarnation_after(self) -> int:
        """A number above every incarnation given so far; it survives restarts in the checkpoint."""
        if self.job.membership is None:
            return self._next_incarnation
        return self.job.membership.next_incarnation

    def _job_of(self, sender: Sender) -> Job:
        if self.job.membership is None:
            raise Fenced(f"the job that rank {sender.rank} belonged to is over")
        return self.job

    async def _publish_or_fail(self) -> None:
        """Brings a loss to the shards; the reason first, if the job fails by it."""
        await self._shutdown.tell_failure()
        try:
            if self.quorum.complete and self.job.failure is None:
                assert self.job.membership is not None
                await self.views.publish(self.job.membership)
        except JobFailed as error:
            self.job.fail(error)

    async def _end_beside(self) -> None:
        """Ends the job; leases run meanwhile, lest a shard that vanishes now is waited for."""
        if self._end is None:
            self._end = asyncio.create_task(self._end_job())
        end = self._end
        await asyncio.wait([end], timeout=TURN_SECONDS)
        if end.done():
            end.result()

    async def _end_job(self) -> None:
        """The last worker has left: save, then stop or make room for the next job."""
        if not self.job.started and not self.stopping and self.failure is None:
            log.info("all who waited for the job's start are gone; ready for the next")
            self._next_incarnation = self._incarnation_after()
            self.counters.leave(self.job.outcome)
            self._begin(self.agreed_model.restored)
            return
        self.outcome = self.job.outcome
        self.last_stats = await self._shutdown.settle(save=self.agreed_model.on_the_hub)
        self.last_job, self.last_step = self.job.name, self.job.step
        self.counters.close(self.outcome)
        log.info("job %s is over: %s", self.job.name, status.summary(self.outcome))
        self._next_incarnation = self._incarnation_after()
        if self.config.colocate:
            await self.fleet.dismiss(self.fleet.shards)
            await self._notifier.announce()
        restored = None
        if not self._closing:
            if not self.outcome.ok:
                # Beside the loop: digests of gigabytes take longer than shards wait for a word.
                restored = await asyncio.to_thread(self.checkpoints.newest)
            await self.fleet.reset()
        if self._closing:  # by now, maybe
            self.done.set()
            return
        self._begin(restored)
        await self._notifier.announce()
        log.info("ready for the next job")

    @property
    def _closing(self) -> bool:
        """Whether no other job follows."""
        return self.config.once or self.stopping or self.failure is not None

    def _held(self) -> Held:
        """What there is to save.

        Raises:
            ConfigError: There is nothing.
        """
        return self.agreed_model.held(self.job, self._incarnation_after())
