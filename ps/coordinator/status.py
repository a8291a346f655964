"""The parts of a hub's status, for `ps-server status` and the server's last line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.shard_fleet import Fleet, Shard
from hubring.ps.core.errors import HubringError
from hubring.ps.job.job import Job
from hubring.ps.job.outcome import Outcome
from hubring.ps.job.verdict import Verdict

if TYPE_CHECKING:
    from hubring.ps.coordinator.coordinator import Coordinator


def workers(job: Job, now: float) -> list[dict[str, Any]]:
    """Returns the last report of each worker, in rank order; `loss` is None if it is not finite."""
    rows = []
    for member in job.members:
        progress = job.progress[member.rank]
        sent = progress.telemetry
        rows.append(
            {
                "rank": member.rank,
                "host": member.host,
                "pid": member.pid,
                "step": progress.step,
                "loss": progress.loss if math.isfinite(progress.loss) else None,
                "steps_per_second": round(progress.step_rate.rate, 3),
                "samples": sent.samples,
                "samples_per_second": round(progress.sample_rate.rate, 3),
                "metrics": dict(sent.metrics),
                "cpu_seconds": sent.cpu_seconds,
                "memory_bytes": sent.memory_bytes,
                "gpu_bytes": sent.gpu_bytes,
                "seconds_waiting": round(progress.waiting, 3),
                "seconds_since_heartbeat": round(now - progress.heard, 3),
            }
        )
    return rows


async def shards(fleet: Fleet) -> list[dict[str, Any]]:
    """Returns a row of `shard` for each shard.

    Raises:
        JobFailed: A shard does not answer.
    """
    asked = fleet.shards
    return [shard(each, stats) for each, stats in zip(asked, await fleet.stats(), strict=True)]


async def shards_now(fleet: Fleet, patience: float) -> list[dict[str, Any]]:
    """Returns a row of `shard` for each shard.

    For a shard that does not answer within `patience` seconds, the row has the numbers of its last
    answer, and the cause in `error`.
    """
    asked = fleet.shards
    rows = []
    for each, why in zip(asked, await fleet.look(patience), strict=True):
        standby = fleet.standby_of(each)
        row = {
            **shard(each, each.last_stats),
            "address": each.addresses.get("grpc", ""),
            "standby": None if standby is None else {"host": standby.host, "pid": standby.pid},
        }
        rows.append({**row, "error": why} if why else row)
    return rows


def heard(shards: list[dict[str, Any]], fleet: Fleet, now: float) -> list[dict[str, Any]]:
    """Adds the seconds since each shard's last heartbeat, and drops the shards that left since."""
    since = {each.index: round(max(0.0, now - each.heard), 3) for each in fleet.shards}
    return [
        {**row, "seconds_since_heartbeat": since[row["shard"]]} for row in shards if row["shard"] in since
    ]


def shard(shard: Shard, stats: pb.ShardStats) -> dict[str, Any]:
    """Returns where one shard runs, and its counters since the job began."""
    return {
        "shard": shard.index,
        "host": shard.host,
        "pid": shard.pid,
        "pushes": stats.pushes,
        "duplicates": stats.duplicates,
        "dropped": stats.dropped,
        "damaged": stats.damaged,
        "refused": dict(sorted(stats.refused.items())),
        "bytes_in": stats.bytes_in,
        "bytes_out": stats.bytes_out,
        "keys": stats.keys,
        "oldest_version": stats.oldest,
        "newest_version": stats.newest,
        "queued_seconds": stats.queued_ns / 1e9,
        "handled_seconds": stats.handled_ns / 1e9,
        "held_seconds": {str(rank): nanoseconds / 1e9 for rank, nanoseconds in sorted(stats.held_ns.items())},
        "cpu_seconds": stats.cpu_ns / 1e9,
        "peak_bytes": stats.peak_bytes,
        "memory_bytes": stats.memory_bytes,
        "gpu_bytes": stats.gpu_bytes,
        "staleness": {str(value): count for value, count in sorted(stats.staleness.items())},
        "partial_rounds": [
            {"key": run.key, "first": run.first, "last": run.last, "ranks": list(run.ranks)}
            for run in stats.partial
        ],
    }


def ends(outcome: Outcome) -> dict[str, Any]:
    """Returns which ranks left, by how they left."""
    return {
        "finished": sorted(outcome.finished),
        "preempted": sorted(outcome.preempted),
        "failed": {str(rank): text for rank, text in sorted(outcome.failed.items())},
        "lost": {str(rank): text for rank, text in sorted(outcome.lost.items())},
    }


def replacements(job: Job, address: str) -> dict[str, str]:
    """Returns the command that replaces a lost worker, by rank; none if the job cannot go on."""
    return {str(rank): f"ps-worker --server {address} --rank {rank} {job.name}" for rank in job.replaceable}


def summary(outcome: Outcome) -> str:
    """Returns how many workers left in each way, in words."""
    counts = {
        "finished": len(outcome.finished),
        "stopped on request": len(outcome.preempted),
        "failed": len(outcome.failed),
        "lost": len(outcome.lost),
    }
    return ", ".join(f"{count} {how}" for how, count in counts.items() if count or how == "finished")


def verdict(job: Job, unsaved: HubringError | None) -> Verdict:
    """Returns how a job ended.

    Args:
        job: The job.
        unsaved: Why its last checkpoint could not be written.
    """
    error = job.failure or unsaved
    text, code = ("", 0) if error is None else (str(error), error.exit_code)
    if error is not None and error is unsaved:
        text = f"the last checkpoint was not written: {error}"
    return Verdict(job.name, summary(job.outcome), text, code)


def too_late(job: Job) -> str:
    """Returns why a worker cannot join a server whose only job is over."""
    return (
        f"job {job.name!r} is over ({summary(job.outcome)}), and this server runs no other job;"
        " start a server for the next job"
    )


def failovers(hub: Coordinator) -> int:
    """Returns how many standbys have taken the place of a lost process since the server started."""
    return hub.takeover.failovers + hub.standbys.failovers
