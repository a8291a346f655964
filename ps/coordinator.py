"""The coordinator: one asyncio loop that knows who takes part and who holds what.

It moves no gradients and does not import torch. It is also where the ring's
members find each other, so that the same two commands start every topology.

The order in which things become known is its law: shards are told of a member
before the member is told of the shards, so that nobody is ever refused for
being new.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from protos import control_pb2 as pb
from protos.control_pb2_grpc import ControlServicer
from ps import manifest as checkpoints
from ps import status
from ps.config import ServerConfig
from ps.consistency import Consistency
from ps.errors import ConfigError, Fenced, HubringError, JobFailed
from ps.fleet import Fleet
from ps.job import Job, Joiner, Outcome, Reason
from ps.manifest import Manifest
from ps.plans import bucket_from_proto, difference, slice_to_proto
from ps.saver import Held, Saver
from ps.sharding import plan as make_plan
from ps.timing import TimeSource
from ps.types import PROTOCOL, BucketSpec, Sender, ShardPlan

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds after which a call that waits for others answers with a sentence instead."""

Context = grpc.aio.ServicerContext[Any, Any]


class Coordinator(ControlServicer):
    """Serves `Control`; one job at a time.

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
        self._config = config
        self._consistency = consistency
        self._clock = clock
        self._restored = restored
        self.fleet = Fleet(config.shards, config.lease)
        self.saver = Saver(self.fleet, Path(config.checkpoint_dir)) if config.checkpoint_dir else None
        self.done = asyncio.Event()
        """Set when the server should end: after its only job, or beyond help."""
        self.outcome: Outcome | None = None
        self.failure: HubringError | None = None
        self.last_checkpoint: Path | None = restored[0] if restored else None
        self.last_job = ""
        self.last_stats: list[dict[str, Any]] = []
        self.draining = False
        self.last_step = 0
        self._changed = asyncio.Condition()
        self._publishing = asyncio.Lock()
        self._planning = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._passing: asyncio.Task[None] | None = None
        self._next_incarnation = restored[1].next_incarnation if restored else 1
        self._begin()

    def _begin(self) -> None:
        """Makes room for a job."""
        self.job = Job(
            workers=self._config.workers or None,
            # A job that must not lose a worker gives it twice the time to come back.
            lease_seconds=self._config.lease * (1 if self._config.on_loss == "drop" else 2),
            keep_going=self._config.on_loss == "drop",
            first_incarnation=self._next_incarnation,
        )
        self._published = 0
        self._buckets: tuple[BucketSpec, ...] | None = None
        self._plan = ShardPlan(())
        self._step = 0
        self._board: dict[str, str] = {}
        self._ending = False
        self._failure_told = False
        self._saved_at = self._clock.now()

    # Control, as workers and people call it.

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        try:
            _check_protocol(request.protocol, "worker")
            if self.draining:
                raise JobFailed("the server is being stopped; start it again, then the worker")
            member = self.job.admit(_joiner(request), self._clock.now())
            await self._announce()
            # A worker that waits here sends no heartbeat: its lease must outlast the wait.
            await self._wait(
                lambda: self.job.started and self.fleet.ready, min(PATIENCE, self._config.lease / 2)
            )
            if not (self.job.started and self.fleet.ready):
                return pb.JoinReply(state=pb.JoinReply.WAITING, text=self._waiting_for())
            await self._publish()
            self.job.admit(_joiner(request), self._clock.now())
        except HubringError as error:
            log.warning("refused %s pid %d: %s", request.host, request.pid, error)
            return pb.JoinReply(state=pb.JoinReply.REFUSED, text=str(error), exit_code=error.exit_code)
        assert self.job.membership is not None
        return pb.JoinReply(
            state=pb.JoinReply.READY,
            rank=member.rank,
            incarnation=member.incarnation,
            world_size=self.job.membership.world_size,
            lease_seconds=self._config.lease,
            late=member not in self.job.membership.view.members,
            mode=self._config.mode,
            lockstep=self._consistency.lockstep,
            shards=[
                pb.ShardAddress(shard=shard.index, host_id=shard.host_id, addresses=shard.addresses)
                for shard in self.fleet.shards
            ],
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        try:
            news = self._job_of(request).beat(
                _sender(request), request.step, request.loss, self._clock.now(), request.waiting
            )
        except Fenced as error:
            return pb.HeartbeatReply(fenced=True, failed=str(error), exit_code=error.exit_code)
        failure = self.job.failure
        return pb.HeartbeatReply(
            failed=str(failure or ""),
            exit_code=failure.exit_code if failure else 0,
            news=news,
            slowest=self.job.slowest(),
        )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        if self.job.membership is None:
            return pb.LeaveReply()
        news = self.job.leave(_sender(request), Reason(request.reason), request.text, request.step)
        await self._publish_or_fail()
        await self._announce()
        return pb.LeaveReply(news=news)

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanReply:
        try:
            job = self._job_of(request)
            assert job.membership is not None
            member = job.membership.member(_sender(request))
            late = member not in job.membership.view.members
            async with self._planning:
                await self._agree(tuple(map(bucket_from_proto, request.buckets)), late)
            step = self._step
            if late:
                seen = max(progress.step for progress in job.progress.values())
                step = min((job.progress[rank].step for rank in job.membership.view.ranks), default=seen)
                job.membership.activate(_sender(request))
                await self._publish()
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except HubringError as error:
            return pb.PlanReply(refused=str(error), exit_code=error.exit_code)
        return pb.PlanReply(
            slices=[slice_to_proto(piece) for piece in self._plan.slices],
            step=step,
            initialised=self._restored is not None,
        )

    async def Rendezvous(self, request: pb.RendezvousRequest, context: Context) -> pb.RendezvousReply:
        try:
            membership = self._job_of(request).membership
            assert membership is not None
            membership.member(_sender(request))
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        if request.value:
            self._board[request.key] = request.value
            await self._announce()
        else:
            await self._wait(lambda: request.key in self._board, min(request.wait_seconds, PATIENCE))
        return pb.RendezvousReply(value=self._board.get(request.key, ""))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        return pb.StatusReply(json=json.dumps(await self.status()))

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.CheckpointReply:
        try:
            path, step = await self.save()
        except HubringError as error:
            return pb.CheckpointReply(refused=str(error))
        return pb.CheckpointReply(path=str(path), step=step)

    # Control, as shards call it.

    async def RegisterShard(
        self, request: pb.RegisterShardRequest, context: Context
    ) -> pb.RegisterShardReply:
        try:
            _check_protocol(request.protocol, "shard")
        except ConfigError as error:
            return pb.RegisterShardReply(refused=str(error))
        if self.job.started and self.fleet.ready:
            return pb.RegisterShardReply()  # lease 0: a job is running, ask again when it is over
        shard = self.fleet.register(request, self._clock.now())
        log.info("%s joined, by %s", shard, ", ".join(sorted(shard.addresses)))
        await self._announce()
        return pb.RegisterShardReply(
            shard=shard.index,
            lease_seconds=self._config.lease,
            mode=self._config.mode,
            staleness=self._config.staleness,
            backup=self._config.backup,
        )

    async def ShardHeartbeat(
        self, request: pb.ShardHeartbeatRequest, context: Context
    ) -> pb.ShardHeartbeatReply:
        try:
            self.fleet.beat(request.shard, request.token, self._clock.now())
        except ConfigError as error:
            log.warning("%s", error)
            return pb.ShardHeartbeatReply(stop=True)
        return pb.ShardHeartbeatReply(stop=self.done.is_set())

    # What the server's process asks for.

    async def tick(self) -> None:
        """Looks after leases, failures, checkpoints and the job's end; called a few times a second."""
        try:
            await self._look_after()
        except JobFailed as error:
            self.shard_lost(str(error))

    async def _look_after(self) -> None:
        now = self._clock.now()
        silent = self.fleet.silent(now)
        if silent is not None:
            self.shard_lost(f"{silent} sent no heartbeat for {now - silent.heard:.1f} s")
        self.job.expire(now)
        # Also what a Leave did not bring about whose caller hung up in the middle.
        await self._publish_or_fail()
        if self.job.over and not self._ending:
            await self._end()
        elif self._due(now):
            # Not awaited: it may take many steps, and leases run meanwhile.
            self._passing = asyncio.create_task(self._save_in_passing())

    def shard_lost(self, what: str) -> None:
        """A shard is gone and its parameters with it: neither job nor server can go on."""
        if self.failure is None:
            self.failure = JobFailed(
                f"{what}; its part of the parameters is lost: start the server again with its"
                " --checkpoint-dir, then the workers"
            )
            self.job.fail(self.failure)
            if self.job.membership is None or self.job.over:
                self.done.set()

    async def drain(self) -> None:
        """Lets every worker finish its step and leave; then the job is over."""
        self.draining = True
        if self.job.membership is None or not self.job.started:
            self.done.set()
        elif self.job.topology == "ring":
            log.warning("a ring job stops at no common step for the hub: it goes on until it is done")
        else:
            try:
                await self.fleet.drain()
            except JobFailed as error:
                self.shard_lost(str(error))

    async def save(self) -> tuple[Path, int]:
        """Writes a checkpoint now.

        Raises:
            ConfigError: There is no directory, or nothing to save.
        """
        if self.saver is None:
            raise ConfigError("the server was started without --checkpoint-dir")
        if not self._holds_parameters:
            raise ConfigError("the shards hold no parameters: no worker has brought any yet")
        assert self._buckets is not None
        async with self._saving:
            held = Held(
                self.job.name, self._config.mode, self._buckets, self._plan, self._incarnation_after()
            )
            self.last_checkpoint, step = await self.saver.save(
                held,
                lockstep=self._consistency.lockstep,
                running=not self.job.over,
                step=self.job.step,
            )
            self._saved_at = self._clock.now()
        return self.last_checkpoint, step

    async def status(self) -> dict[str, Any]:
        """The server as one JSON object: job, workers, shards, who waits for whom."""
        return {
            "job": self.job.name,
            "topology": self.job.topology,
            "mode": self._config.mode,
            "state": self._state(),
            "epoch": self._published,
            "draining": self.draining,
            "workers": status.workers(self.job, self._clock.now()),
            "shards": await self._shards(),
            "slowest": self.job.slowest(),
            "checkpoint": str(self.last_checkpoint or ""),
        }

    # Inside.

    async def _shards(self) -> list[dict[str, Any]]:
        try:
            return [status.shard(stats) for stats in await self.fleet.stats()]
        except JobFailed as error:
            return [{"error": str(error)}]

    def _state(self) -> str:
        if self.job.failure is not None:
            return f"failed: {self.job.failure}"
        return "running" if self.job.started else self._waiting_for()

    def _waiting_for(self) -> str:
        if not self.fleet.ready:
            return (
                f"waiting for {self.fleet.expected - len(self.fleet.shards)} of {self.fleet.expected} shards"
            )
        return self.job.waiting_for()

    @property
    def _holds_parameters(self) -> bool:
        return bool(self._buckets) and all(bucket.optimizer for bucket in self._buckets or ())

    def _incarnation_after(self) -> int:
        """A number above every incarnation given so far; it survives restarts in the checkpoint."""
        if self.job.membership is None:
            return self._next_incarnation
        return self.job.membership.next_incarnation

    def _job_of(self, request: Any) -> Job:
        if self.job.membership is None:
            raise Fenced(f"the job that rank {request.rank} belonged to is over")
        return self.job

    async def _agree(self, offered: tuple[BucketSpec, ...], late: bool) -> None:
        """Takes the first worker's buckets as the job's, and holds the others' against them."""
        if late and not all(bucket.optimizer for bucket in offered):
            raise ConfigError(
                "under --aggregate the hub holds no parameters to give to a worker that comes late:"
                " start the job again with all of its workers"
            )
        if self._buckets is not None:
            clause = difference(self._buckets, offered)
            if clause is None:
                return
            error = ConfigError(f"this worker's model is not the job's: it has {clause}")
            if not late:
                self.job.fail(ConfigError(f"the workers' models differ: one has {clause}"))
            raise error
        if not self._consistency.lockstep and not all(bucket.optimizer for bucket in offered):
            raise ConfigError(
                f"--aggregate needs a synchronous hub; this one runs --mode {self._config.mode}:"
                " start it with --mode bsp"
            )
        plan = make_plan(offered, len(self.fleet.shards), self._config.slice_bytes)
        if self._restored is not None:
            self._check_restored(*self._restored, offered, plan)
            self._step = self._restored[1].step
        await self.fleet.set_plan(offered, plan, self._restored[0] if self._restored else None)
        self._buckets, self._plan = offered, plan

    def _check_restored(
        self, path: Path, manifest: Manifest, offered: tuple[BucketSpec, ...], plan: ShardPlan
    ) -> None:
        clause = difference(manifest.buckets, offered)
        if clause is None and _cuts(manifest.slices) != _cuts(plan.slices):
            clause = "slices cut by another --slice-bytes"
        if clause is not None:
            raise ConfigError(
                f"the checkpoint {path} is of another model: this worker has {clause}."
                " Start the server with another --checkpoint-dir, or the job that it belongs to"
            )

    async def _publish(self) -> None:
        """Brings the current view to every shard; returns when they act on it."""
        async with self._publishing:
            assert self.job.membership is not None
            view = self.job.membership.view
            if view.epoch > self._published:
                await self.fleet.set_view(view)
                self._published = view.epoch

    async def _tell_failure(self) -> None:
        """Lets everybody who waits for a shard know that the job has failed, once."""
        if self.job.failure is not None and not self._failure_told:
            self._failure_told = True
            await self.fleet.fail(str(self.job.failure))

    async def _publish_or_fail(self) -> None:
        """Brings a loss to the shards; the reason first, if the job fails by it."""
        await self._tell_failure()
        try:
            if self.job.started and self.fleet.ready:
                await self._publish()
        except JobFailed as error:
            self.job.fail(error)

    async def _end(self) -> None:
        """The last worker has left: save, then stop or make room for the next job."""
        if not self.job.started and not self.draining and self.failure is None:
            log.info("all who waited for the job's start are gone; ready for the next")
            self._next_incarnation = self._incarnation_after()
            self._begin()
            return
        self._ending = True
        self.outcome = self.job.outcome
        await self._stop_passing()
        if self.saver is not None and self._holds_parameters and self.failure is None:
            await self._save_in_passing()
        self.last_job, self.last_step = self.job.name, self.job.step
        log.info("job %s is over: %s", self.job.name, status.summary(self.outcome))
        self._next_incarnation = self._incarnation_after()
        if self.failure is None:
            self.last_stats = [status.shard(stats) for stats in await self.fleet.stats()]
        if self._config.once or self.draining or self.failure is not None:
            self.done.set()
            return
        await self.fleet.reset()
        self._restored = None if self.outcome.ok else self._newest()
        self._begin()
        log.info("ready for the next job")

    def _newest(self) -> tuple[Path, Manifest] | None:
        """From where a job that broke off goes on."""
        return checkpoints.newest(self._config.checkpoint_dir) if self._config.checkpoint_dir else None

    async def _stop_passing(self) -> None:
        """Gives up a checkpoint under way: its step will not be reached any more."""
        if self._passing is not None and not self._passing.done():
            self._passing.cancel()
            await asyncio.wait([self._passing])

    async def _save_in_passing(self) -> None:
        try:
            await self.save()
        except HubringError as error:
            log.error("no checkpoint: %s", error)
            self._saved_at = self._clock.now()

    def _due(self, now: float) -> bool:
        return (
            self.saver is not None
            and self._holds_parameters
            and self.job.started
            and self.job.failure is None
            and not self._saving.locked()
            and now - self._saved_at >= self._config.checkpoint_every
        )

    async def _wait(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Waits until `condition()`, or for `seconds`."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), seconds)
            except TimeoutError:
                return

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _check_protocol(theirs: int, who: str) -> None:
    if theirs != PROTOCOL:
        raise ConfigError(
            f"the {who} speaks protocol {theirs}, this server {PROTOCOL}: install the same version on both"
        )


def _joiner(request: pb.JoinRequest) -> Joiner:
    return Joiner(
        token=request.token,
        job=request.job,
        topology=request.topology,
        host=request.host,
        pid=request.pid,
        rank=None if request.rank < 0 else request.rank,
        world_size=request.world_size or None,
    )


def _sender(
    request: pb.HeartbeatRequest | pb.LeaveRequest | pb.PlanRequest | pb.RendezvousRequest,
) -> Sender:
    return Sender(request.rank, request.incarnation)


def _cuts(slices: tuple[Any, ...]) -> list[tuple[int, int, int, int]]:
    return [(piece.key, piece.bucket, piece.offset, piece.numel) for piece in slices]
