"""The end of one job: its last worker leaves, it is drained, or it loses a shard.

Law: when the last worker has left, the shards are saved and their counters read, if no shard is lost. The
loss of a shard cancels these calls at any point: a host that is gone refuses no connection and never
answers. A task of `Shutdown` sends what all shards must get: a caller that disconnects ends
nothing. The next job begins once that task has ended.

Law: a worker that finished learns the verdict of its job. The server stops only after such workers have
confirmed it, or after it has waited for them: an answer can be lost, and a worker then asks again.
Workers of an earlier job, or of one that ended long ago, ask no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.checkpoints import CheckpointSchedule
from hubring.ps.coordinator.joining import Notifier
from hubring.ps.coordinator.shard_fleet import Fleet, Shard, ShardSilent
from hubring.ps.core.errors import RESTART_ALL, RESTART_JOB, Fenced, JobFailed
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Sender
from hubring.ps.job.job import Job
from hubring.ps.job.outcome import EndedJob, JobVerdict

log = logging.getLogger(__name__)

KEPT_JOBS = 8
"""A worker asks at once how its job ended, so a few jobs are enough."""


class Departures:
    """The departures from all jobs of a server.

    Args:
        job: Returns the current job.
        notifier: Where workers wait for the end of their job.
        clock: The source of the time.
        patience: Seconds after which a worker without an answer gives up.

    Attributes:
        ended: The last jobs that ended, the latest at the end.
        waiting: The workers that finished, and have not confirmed yet that they know how their job ended.
    """

    def __init__(
        self, job: Callable[[], Job], notifier: Notifier, clock: TimeSource, patience: float
    ) -> None:
        self._job = job
        self._notifier = notifier
        self._clock = clock
        self._patience = patience
        self._closed_at = clock.now()
        """When the last job ended, or when this process took over."""
        self.ended: list[EndedJob] = []
        self.waiting: set[Sender] = set()

    async def close(self, job: Job, verdict: JobVerdict) -> None:
        """Records how a job ended, and answers the workers that wait."""
        if job.membership is not None:
            self.ended = [*self.ended, (job.membership.departed, verdict)][-KEPT_JOBS:]
            self.waiting = {each for each in self.waiting if each.incarnation in job.membership.departed}
        self._closed_at = self._clock.now()
        await self._notifier.announce()

    def verdict(self, sender: Sender) -> JobVerdict | None:
        """Returns how the job ended that this worker left; None if it runs, or the worker did not leave."""
        for departed, verdict in self.ended:
            gone = departed.get(sender.incarnation)
            if gone is not None and gone.left:
                return verdict
        return None

    async def await_verdict(self, sender: Sender, seconds: float) -> JobVerdict | None:
        """Returns how this worker's job ended, or None if it still runs after `seconds`."""
        await self._notifier.wait_for(lambda: self.verdict(sender) is not None, seconds)
        return self.verdict(sender)

    async def heard(self, sender: Sender) -> None:
        """Notes that a worker knows how its job ended."""
        self.waiting.discard(sender)
        await self._notifier.announce()

    def awaited(self) -> str:
        """Returns what the end of the current job waits for, in words."""
        return ", ".join(map(str, self._job().members)) or "the last checkpoint"

    def check(self, sender: Sender) -> None:
        """Raises Fenced if this worker's job is over, or if this server does not know the worker."""
        for departed, verdict in self.ended:
            if gone := departed.get(sender.incarnation):
                raise Fenced(f"{verdict}. {gone.member} was no member at the end: {gone.why}")
        if self._job().membership is None:
            raise Fenced(
                f"this server runs no job of rank {sender.rank}: it did not admit the worker, or has"
                " restarted since. Restart the worker to join the next job"
            )

    async def wait_until_told(self, seconds: float) -> None:
        """Waits until the workers that finished know how their job ended, at most `seconds`."""
        await self._notifier.wait_out(lambda: not self._unanswered(), seconds)
        for sender in self._unanswered():
            log.warning("rank %d finished, but did not confirm that it knows how the job ended", sender.rank)

    def _unanswered(self) -> list[Sender]:
        if self._clock.now() - self._closed_at > self._patience:
            return []
        return [sender for sender in self.waiting if self.verdict(sender) is not None]


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
        self.lost = asyncio.Event()
        """Set once the job has lost a shard."""
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
        lost = f"at about step {self._job.step}; its part of the parameters is lost"
        if self._colocate and self._job.finish:
            lost += ", which other workers or the last checkpoint still need"
        error = JobFailed(f"{what}, {lost if self._job.started else 'before the job began'}. {fix}")
        if not self._colocate and self.failure is None:
            self.failure = error
        self.lost.set()
        self._job.fail(error)

    def spares(self, worker: int) -> bool:
        """Whether a worker that finished leaves a shard that no one needs: all took its steps, none saves."""
        job, membership = self._job, self._job.membership
        gone = None if membership is None else membership.departed.get(worker)
        if gone is None or not gone.left or job.finish is None or self._checkpoints.directory is not None:
            return False
        return all(job.progress[each.rank].step == job.finish.step for each in job.members)

    async def spare(self, now: float) -> None:
        """Removes the silent shards that the others need no more."""
        gone = [shard for shard in self._fleet.silent(now) if self.spares(shard.worker)]
        for shard in gone:
            line = f"{shard} ended with its worker, which had finished; the others have its parameters"
            log.warning("%s", line)
            self._job.tell(line)
        self._job.spared += len(gone)
        await self._fleet.dismiss(gone)

    def verdict(self) -> JobVerdict:
        """Returns how the job ended."""
        unsaved = self._checkpoints.failure
        error = self._job.failure or unsaved
        text, code = ("", 0) if error is None else (str(error), error.exit_code)
        if error is not None and error is unsaved:
            text = f"the last checkpoint was not written: {error}"
        return JobVerdict(self._job.name, self._job.outcome.summary, text, code)

    def too_late(self) -> str:
        """Returns why a worker cannot join a server whose only job is over."""
        return (
            f"job {self._job.name!r} is over ({self._job.outcome.summary}), and this server runs no other"
            " job; start a server for the next job"
        )

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
            return await self._unless_lost(self._rows()) or []
        except ShardSilent as error:
            if not self._colocate:
                self.lose_shard(error.cause)
            return [{"error": str(error)}]

    async def _rows(self) -> list[dict[str, Any]]:
        shards = self._fleet.shards
        return [shard_row(*each) for each in zip(shards, await self._fleet.stats(), strict=True)]

    async def _finish_calls(self) -> None:
        """Waits until the pending calls to the shards have ended; cancels them once a shard is lost."""
        calls = [call for call in (self._draining, self._failing) if call is not None]
        if calls:
            await self._unless_lost(asyncio.wait(calls))
        for call in calls:
            call.cancel()

    async def _unless_lost(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Returns the work's result; cancels the work and returns None once a shard is lost."""
        if self.lost.is_set():
            work.close()
            return None
        working, loss = asyncio.create_task(work), asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait([working, loss], return_when=asyncio.FIRST_COMPLETED)
            return None if self.lost.is_set() else await working
        finally:
            for task in (working, loss):
                task.cancel()
            await asyncio.wait([working, loss])


_COUNTERS = (
    *("pushes", "duplicates", "dropped", "damaged", "bytes_in", "bytes_out", "keys"),
    *("peak_bytes", "memory_bytes", "gpu_bytes"),
)
"""Fields of `ShardStats` that are shown as they are."""


def shard_row(shard: Shard, stats: pb.ShardStats) -> dict[str, Any]:
    """Returns where one shard runs, and its counters since the job began."""
    return {
        "shard": shard.index,
        "host": shard.host,
        "pid": shard.pid,
        **{name: getattr(stats, name) for name in _COUNTERS},
        **{f"{name}_seconds": getattr(stats, f"{name}_ns") / 1e9 for name in ("queued", "handled", "cpu")},
        "refused": dict(sorted(stats.refused.items())),
        "oldest_version": stats.oldest,
        "newest_version": stats.newest,
        "held_seconds": {str(rank): nanoseconds / 1e9 for rank, nanoseconds in sorted(stats.held_ns.items())},
        "staleness": {str(value): count for value, count in sorted(stats.staleness.items())},
        "partial_rounds": [
            {"key": run.key, "first": run.first, "last": run.last, "ranks": list(run.ranks)}
            for run in stats.partial
        ],
    }
