"""A coordinator's status as one JSON object, and the health of its services."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hubring.ps.coordinator import status
from hubring.ps.core.types import PROTOCOL
from hubring.ps.observe.health import CONTROL, DATA, PROCESS, READY
from hubring.ps.transport.host import bracketed, reachable

if TYPE_CHECKING:
    from hubring.ps.coordinator.coordinator import Coordinator


class Reporter:
    """Reads a coordinator's state.

    Args:
        coordinator: Only read.
        began: Time of the server's start, in monotonic seconds.
    """

    def __init__(self, coordinator: Coordinator, began: float) -> None:
        self._coordinator = coordinator
        self._began = began
        self._version = version("hubring")

    def status(self, shards: list[dict[str, Any]], now: float) -> dict[str, Any]:
        """Returns the status with these rows of the shards."""
        hub = self._coordinator
        job, config, checkpoints = hub.job, hub.config, hub.checkpoints
        return {
            "version": self._version,
            "pid": os.getpid(),
            "protocol": PROTOCOL,
            "seconds_up": round(now - self._began, 3),
            "job": job.name,
            "topology": job.topology,
            "mode": config.mode,
            "state": self._state(),
            "started": hub.quorum.complete,
            "epoch": hub.views.epoch,
            "ring_generation": job.generations.current.number if job.generations.heals else None,
            "ring_pause": round(job.generations.pause, 3) if job.generations.heals else None,
            "draining": hub.stopping or job.draining,
            "ends_with_job": config.once or hub.stopping,
            "failure": str(hub.failure or job.failure or ""),
            "world_size": job.world_size or config.workers,
            "lease_seconds": config.lease,
            "step": job.step,
            "progress": job.completion.part,
            "seconds_left": job.completion.seconds_left(now),
            "workers": status.workers(job, now),
            "shards": status.heard(shards, hub.fleet, now),
            "shards_wanted": hub.quorum.shards_wanted,
            "failovers": status.failovers(hub),
            "slowest": job.slowest(),
            "ended": status.ends(job.outcome),
            "replace": status.replacements(job, f"{bracketed(reachable(config.host))}:{config.port}"),
            "totals": hub.counters.counts(job.outcome),
            "checkpoint": str(checkpoints.last or ""),
            "checkpoints": checkpoints.written,
            "checkpoint_age": checkpoints.age(now) if hub.trains else None,
            "checkpoint_every": config.checkpoint_every if config.checkpoint_dir else None,
        }

    def troubles(self, now: float) -> dict[str, str]:
        """Returns why each service (by its grpc.health.v1 name) is unavailable; empty text if available.

        Anybody may ask, so the reasons repeat no text of a worker.
        """
        hub = self._coordinator
        ended = "the server is ending" if hub.done.is_set() else ""
        failure = hub.failure or hub.job.failure
        failed = "the job has failed; for the reason, run: ps-server status" if failure else ""
        silent = [shard for shard in hub.fleet.silent(now) if not shard.standby]
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
