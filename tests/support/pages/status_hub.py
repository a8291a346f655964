"""A fake hub for the page, whose status a test sets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.status import StatusReporter
from hubring.ps.core.errors import HubringError
from hubring.ps.observe.logs import Journal, LogEntry
from hubring.ps.page.snapshot import Rates, Snapshot
from hubring.ps.page.status_reader import ProgressSample

TOKEN = "a token that is long enough"


def worker(rank: int, **changes: Any) -> dict[str, Any]:
    """Returns a worker's row of the status."""
    row = {
        "rank": rank,
        "host": "node1",
        "pid": 1000 + rank,
        "step": 40,
        "loss": 0.5,
        "steps_per_second": 2.0,
        "samples": 0,
        "samples_per_second": 0.0,
        "metrics": {},
        "cpu_seconds": 12.0,
        "memory_bytes": 400_000_000,
        "gpu_bytes": 0,
        "gpu_use": None,
        "total_steps": 0,
        "seconds_waiting": 0.0,
        "seconds_since_heartbeat": 0.3,
    }
    return row | changes


def shard(index: int, **changes: Any) -> dict[str, Any]:
    """Returns a shard's row of the status."""
    row = {
        "shard": index,
        "host": "node0",
        "pid": 2000 + index,
        "pushes": 160,
        **dict.fromkeys(("duplicates", "dropped", "damaged", "gpu_bytes"), 0),
        "refused": {},
        "bytes_in": 4_000_000,
        "bytes_out": 5_000_000,
        "keys": 12,
        "oldest_version": 40,
        "newest_version": 40,
        "queued_seconds": 0.1,
        "handled_seconds": 0.2,
        "held_seconds": {"0": 1.0, "1": 2.0},
        "cpu_seconds": 0.5,
        "peak_bytes": 1 << 20,
        "memory_bytes": 300_000_000,
        "staleness": {"0": 150, "3": 10},
        "partial_rounds": [],
        "seconds_since_heartbeat": 0.2,
    }
    return row | changes


def report(count: int = 4, **changes: Any) -> dict[str, Any]:
    """Returns a status without shards: a job with `count` training workers."""
    told: dict[str, Any] = {
        "version": "0.1.0",
        "protocol": 4,
        "seconds_up": 100.0,
        "job": "train.py",
        "topology": "hub",
        "mode": "bsp",
        "state": "running",
        "started": True,
        "epoch": 1,
        **dict.fromkeys(("ring_generation", "ring_pause", "progress", "seconds_left"), None),
        **dict.fromkeys(("draining", "ends_with_job"), False),
        **dict.fromkeys(("failure", "slowest", "checkpoint"), ""),
        **dict.fromkeys(("checkpoints", "failovers"), 0),
        **dict.fromkeys(("checkpoint_age", "checkpoint_every"), None),
        "world_size": count,
        "lease_seconds": 5.0,
        "step": 40,
        "workers": [worker(rank) for rank in range(count)],
        "shards_wanted": 2,
        "ended": {"finished": [], "preempted": [], "failed": {}, "lost": {}},
        "replace": {},
        "totals": {
            "jobs": {"finished": 0, "preempted": 0, "failed": 0},
            "workers": {"finished": 0, "preempted": 0, "failed": 0, "lost": 0},
            "refused": {},
        },
    }
    return told | changes


SAMPLES = tuple(ProgressSample(90.0 + at, 30 + at, 1.0 / (1 + at), 8.0) for at in range(10))


def snapshot(
    *shards: dict[str, Any],
    log: tuple[LogEntry, ...] = (),
    samples: Sequence[ProgressSample] = SAMPLES,
    **changes: Any,
) -> Snapshot:
    """Returns the page's view of a report."""
    return Snapshot.of(report(**changes) | {"shards": list(shards)}, Rates(), samples, log)


class StatusHub:
    """Stands in for a hub's coordinator and its reporter; `done` lists its requests."""

    def __init__(self, workers: int = 4, shards: int = 2) -> None:
        self.told = report(workers)
        self.rows = [shard(index) for index in range(shards)]
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = 0
        self.done: list[str] = []
        self.refusal: HubringError | None = None
        self.checkpoints = self

    @property
    def coordinator(self) -> Coordinator:
        return cast(Coordinator, self)

    @property
    def reporter(self) -> StatusReporter:
        return cast(StatusReporter, self)

    def report(self, shards: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.told, "workers": [dict(row) for row in self.told["workers"]], "shards": shards}

    async def shards(self) -> list[dict[str, Any]]:
        self.asked += 1
        await self.may_answer.wait()
        return [dict(row) for row in self.rows]

    async def save(self) -> tuple[Path, int]:
        self._do("save")
        return Path("/checkpoints/step-40"), 40

    async def drain(self) -> None:
        self._do("drain")

    async def end(self, why: str) -> None:
        self._do(f"end: {why}")

    def _do(self, what: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.done.append(what)


def journal(*texts: str, level: str = "info") -> Journal:
    """Returns a log with these lines."""
    made = Journal()
    for text in texts:
        made.handle(logging.makeLogRecord({"msg": text, "levelname": level.upper(), "levelno": 20}))
    return made
