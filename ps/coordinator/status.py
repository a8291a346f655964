"""A coordinator's status as one JSON object, for `ps-server status`, and the health of its services."""

from __future__ import annotations

import math
import os
from importlib.metadata import version
from typing import Any

from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.shard_fleet import LOOK_SECONDS, Fleet
from hubring.ps.coordinator.shutdown import shard_row
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import PROTOCOL
from hubring.ps.job.job import Job
from hubring.ps.job.outcome import JobOutcome
from hubring.ps.observe.health import CONTROL, DATA, PROCESS, READY
from hubring.ps.transport.host import bracketed, reachable

_SHOWN = ("samples", "total_steps", "metrics", "cpu_seconds", "memory_bytes", "gpu_bytes", "gpu_use")


def worker_rows(job: Job, now: float, *, together: bool) -> list[dict[str, Any]]:
    """Returns the last report of each worker, in rank order; `loss` is None if it is not finite.

    With `together`, a step takes all workers: once one has completed it, the others have completed the one
    before, even if their last report is older.
    """
    newest = max((each.step for each in job.progress.values()), default=0)  # also of those that left
    gone = job.membership.disconnected if job.membership is not None else ()
    rows = []
    for member in job.members:
        progress = job.progress[member.rank]
        sent = progress.telemetry
        rows.append(
            {
                "rank": member.rank,
                "host": member.host,
                "pid": member.pid,
                "connected": member not in gone,
                "step": max(progress.step, newest - 1) if together else progress.step,
                "loss": progress.loss if math.isfinite(progress.loss) else None,
                "steps_per_second": round(progress.step_rate.rate, 3),
                "samples_per_second": round(progress.sample_rate.rate, 3),
                **{name: getattr(sent, name) for name in _SHOWN},
                "seconds_waiting": round(progress.waiting, 3),
                "seconds_since_heartbeat": round(now - progress.heard, 3),
            }
        )
    return rows


def with_heartbeat_ages(shards: list[dict[str, Any]], fleet: Fleet, now: float) -> list[dict[str, Any]]:
    """Adds the seconds since each shard's last heartbeat, and drops the shards that left since."""
    since = {each.index: round(max(0.0, now - each.heard), 3) for each in fleet.shards}
    rows = [row for row in shards if row["shard"] in since]
    return [{**row, "seconds_since_heartbeat": since[row["shard"]]} for row in rows]


def ended_ranks(outcome: JobOutcome) -> dict[str, Any]:
    """Returns which ranks left, by how they left."""
    return {
        "finished": sorted(outcome.finished),
        "preempted": sorted(outcome.preempted),
        "failed": {str(rank): text for rank, text in sorted(outcome.failed.items())},
        "lost": {str(rank): text for rank, text in sorted(outcome.lost.items())},
    }


class StatusReporter:
    """Reads a coordinator's state.

    Args:
        coordinator: Only read.
        clock: The coordinator's source of the time.
    """

    def __init__(self, coordinator: Coordinator, clock: TimeSource) -> None:
        self._coordinator, self._clock = coordinator, clock
        self._version = version("hubring")

    async def status(self, patience: float = LOOK_SECONDS) -> dict[str, Any]:
        """Returns the server's status as one JSON object. Waits as `shards`."""
        return self.report(await self.shards(patience))

    async def shards(self, patience: float = LOOK_SECONDS) -> list[dict[str, Any]]:
        """Returns a row of `shard` for each shard.

        For a shard that does not answer within `patience` seconds, the row has the numbers of its last
        answer, and the cause in `error`.
        """
        fleet, rows = self._coordinator.fleet, []
        asked = fleet.shards
        for each, why in zip(asked, await fleet.look(patience), strict=True):
            standby = fleet.standby_of(each)
            row = {
                **shard_row(each, each.last_stats),
                "address": each.addresses.get("grpc", ""),
                "standby": None if standby is None else {"host": standby.host, "pid": standby.pid},
            }
            rows.append({**row, "error": why} if why else row)
        return rows

    def report(self, shards: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the status with these rows of the shards."""
        hub, now = self._coordinator, self._clock.now()
        job, config, checkpoints = hub.job, hub.config, hub.checkpoints
        workers = worker_rows(job, now, together=job.topology == "ring" or hub.consistency.stable)
        replace = f"ps-worker --server {bracketed(reachable(config.host))}:{config.port}"
        return {
            "version": self._version,
            "pid": os.getpid(),
            "protocol": PROTOCOL,
            "seconds_up": round(now - hub.began, 3),
            "job": job.name,
            "topology": job.topology,
            "mode": "" if job.topology == "ring" else config.mode,
            "state": self._state(),
            "started": hub.quorum.complete,
            "epoch": hub.job.published,
            "ring_generation": job.generations.current.number if job.generations.heals else None,
            "ring_pause": round(job.generations.pause, 3) if job.generations.heals else None,
            "draining": hub.stopping or job.draining,
            "ends_with_job": config.once or hub.stopping,
            "failure": str(hub.failure or job.failure or ""),
            "world_size": job.world_size or config.workers,
            "lease_seconds": config.lease,
            "step": min((row["step"] for row in workers), default=job.step),
            "progress": job.completion.part,
            "seconds_left": job.completion.seconds_left(now),
            "workers": workers,
            "shards": with_heartbeat_ages(shards, hub.fleet, now),
            "shards_wanted": hub.quorum.shards_wanted,
            "failovers": hub.failovers,
            "slowest": job.slowest(),
            "ended": ended_ranks(job.outcome),
            "replace": {str(rank): f"{replace} --rank {rank} {job.name}" for rank in job.replaceable},
            "totals": hub.counters.counts(job.outcome),
            "checkpoint": str(checkpoints.last or ""),
            "checkpoints": checkpoints.written,
            "checkpoint_age": checkpoints.age(now) if hub.trains else None,
            "checkpoint_every": config.checkpoint_every if config.checkpoint_dir else None,
        }

    def troubles(self) -> dict[str, str]:
        """Returns why each service (by its grpc.health.v1 name) is unavailable; empty text if available.

        Any client may ask, so the reasons repeat no text of a worker.
        """
        hub = self._coordinator
        ended = "the server is ending" if hub.done.is_set() else ""
        failure = hub.failure or hub.job.failure
        failed = "the job has failed; for the reason, run: ps-server status" if failure else ""
        silent = [shard for shard in hub.fleet.silent(self._clock.now()) if not shard.standby]
        unheard = f"{silent[0]} sends no heartbeat" if silent else ""
        stopping = "the server is stopping" if hub.stopping else ""
        return {
            PROCESS: ended,
            CONTROL: ended,
            DATA: ended or failed or unheard or hub.quorum.shards_missing,
            READY: ended or stopping or failed,
        }

    def _state(self) -> str:
        hub = self._coordinator
        if hub.job.failure is not None:
            return f"failed: {hub.job.failure}"
        return "running" if hub.quorum.complete else hub.quorum.waiting_for()
