"""Snapshot: everything that the page shows at one time, computed from the hub's report.

Rates tell how fast counters rise while the page is watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from hubring.ps.job.membership import heartbeat_seconds
from hubring.ps.job.telemetry import HELD_UP, StepRate
from hubring.ps.observe.logs import LogEntry
from hubring.ps.page.status_reader import ProgressSample

FORGOTTEN_SECONDS = 10.0
"""Seconds between two readings after which all rates restart."""


class Rates:
    """The rates of counters that are read together, by name."""

    def __init__(self) -> None:
        self._rates: dict[str, StepRate] = {}
        self._now = 0.0

    def at(self, now: float) -> None:
        """Sets the time of the next readings, in monotonic seconds."""
        if now - self._now > FORGOTTEN_SECONDS:
            self._rates.clear()
        self._now = now

    def of(self, name: str, count: int) -> float:
        """Notes a reading and returns the rate per second; 0 if it is not known yet."""
        rate = self._rates.get(name)
        if rate is None:
            rate = self._rates[name] = StepRate()
        rate.note(count, self._now)
        return rate.rate


LATE_SECONDS = 0.5
"""How late a heartbeat can be before the page shows its sender as silent. Including the page's own delay, a
stopped worker shows as silent within 2 seconds."""

WorkerState = Literal[
    "training", "blocked", "silent", "joined", "missing", "finished", "stopped", "failed", "lost"
]
WORKER_STATES: tuple[WorkerState, ...] = get_args(WorkerState)

_TEXTS: Mapping[WorkerState, str] = {
    "blocked": "blocked by others",
    "joined": "waiting for the start",
    "missing": "not joined",
    "stopped": "stopped on request",
}
"""Texts of the states whose name is not clear enough."""


def meaning(state: WorkerState) -> str:
    """Returns a state in words."""
    return _TEXTS.get(state, state)


class WorkerSnapshot(NamedTuple):
    """One rank of the job, and the worker that has it or had it last.

    Attributes:
        rank: The rank.
        state: The worker's state.
        where: Host and process; empty if no worker has the rank.
        why: The reason if the worker failed or was lost.
        replace: The command that replaces the worker, if the job can continue without it.
        holding: Recent seconds per second for which shards delayed answers to it, summed over the shards.
        cores: Recent CPU seconds per second.
        step: Completed steps, as far as is known; like all below from the report.
        loss: The last reported loss.
        steps_per_second: The recent speed.
        samples: Training samples; 0 if the script does not report them.
        samples_per_second: The recent speed.
        seconds_waiting: For how long the worker has been blocked.
        seconds_since_heartbeat: The time since its last heartbeat.
        memory_bytes: Resident memory; 0 if it is not known.
        gpu_bytes: GPU memory; 0 without a GPU.
        gpu_use: Part of the time in which its GPUs compute, from 0 to 1; None if it is not known.
    """

    rank: int
    state: WorkerState
    where: str = ""
    why: str = ""
    replace: str = ""
    holding: float = 0.0
    cores: float = 0.0
    step: int = 0
    loss: float | None = None
    steps_per_second: float = 0.0
    samples: int = 0
    samples_per_second: float = 0.0
    seconds_waiting: float = 0.0
    seconds_since_heartbeat: float = 0.0
    memory_bytes: int = 0
    gpu_bytes: int = 0
    gpu_use: float | None = None

    @property
    def present(self) -> bool:
        """Whether a worker has the rank."""
        return bool(self.where)

    @property
    def doing(self) -> str:
        """The state in words."""
        if self.state == "silent":
            return f"silent for {int(self.seconds_since_heartbeat)} s"
        if self.state == "blocked":
            return f"blocked for {int(self.seconds_waiting)} s"
        text = meaning(self.state)
        return f"{text}: {self.why}" if self.why else text


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """One shard. Bytes and pushes count from the start of the job.

    Attributes:
        index: The shard's number.
        where: Host and process.
        bytes_in: Bytes of received gradients.
        bytes_out: Bytes of sent parameters.
        rate: Recent bytes per second, in both directions.
        keys: The number of slices that the shard holds.
        oldest_version: Lowest version of any slice.
        newest_version: Highest version of any slice.
        pushes: Gradients that were applied.
        dropped: Gradients that arrived too late for their round.
        silent: Seconds since the last heartbeat if it is overdue; otherwise 0.
        cores: Recent CPU seconds per second.
        memory_bytes: Resident memory in bytes.
        gpu_bytes: GPU memory in bytes; 0 without a GPU.
    """

    index: int
    where: str
    bytes_in: int
    bytes_out: int
    rate: float
    keys: int
    oldest_version: int
    newest_version: int
    pushes: int
    dropped: int
    silent: float
    cores: float
    memory_bytes: int
    gpu_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the page shows.

    Attributes:
        report: The report of `StatusReporter.status`.
        workers: The workers, by rank.
        shards: The shards, by number.
        troubles: Errors of shards that did not report.
        samples: The job's samples so far.
        entries: The log, oldest line first.
    """

    report: Mapping[str, Any]
    workers: tuple[WorkerSnapshot, ...]
    shards: tuple[ShardSnapshot, ...]
    troubles: tuple[str, ...]
    samples: tuple[ProgressSample, ...]
    entries: tuple[LogEntry, ...]

    @staticmethod
    def of(
        report: Mapping[str, Any],
        rates: Rates,
        samples: Sequence[ProgressSample],
        entries: Sequence[LogEntry],
    ) -> Snapshot:
        """Computes a snapshot. `rates` has the readings of earlier reports."""
        rates.at(report["seconds_up"])
        shards = report["shards"]
        return Snapshot(
            report=report,
            workers=tuple(_workers(report, _held(shards), rates)),
            shards=tuple(_shard(row, report["lease_seconds"], rates) for row in shards),
            troubles=tuple(row["error"] for row in shards if "error" in row),
            samples=tuple(samples),
            entries=tuple(entries),
        )

    @property
    def on_ring(self) -> bool:
        return bool(self.report["topology"] == "ring")

    @property
    def present(self) -> list[WorkerSnapshot]:
        """The workers in the job."""
        return [worker for worker in self.workers if worker.present]

    @property
    def silent(self) -> list[WorkerSnapshot]:
        """The workers whose heartbeat is overdue."""
        return [worker for worker in self.workers if worker.state == "silent"]

    @property
    def counts(self) -> dict[WorkerState, int]:
        """The number of workers in each state; empty states are omitted."""
        found = Counter(worker.state for worker in self.workers)
        return {state: found[state] for state in WORKER_STATES if found[state]}

    @property
    def staleness(self) -> dict[int, int]:
        """The number of applied pushes by staleness, summed over the shards."""
        found: Counter[int] = Counter()
        for row in self.report["shards"]:
            found.update({int(steps): count for steps, count in row["staleness"].items()})
        return dict(sorted(found.items()))


def states(report: Mapping[str, Any]) -> dict[int, WorkerState]:
    """Returns the state of every worker in the job, by rank."""
    return {row["rank"]: _state(row, report) for row in report["workers"]}


def overdue(seconds: float, every: float) -> bool:
    """Returns whether a heartbeat is overdue: the last was `seconds` ago, and one is sent `every` seconds."""
    return seconds > every + LATE_SECONDS


def _held(shards: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns the seconds for which answers were delayed, by rank, summed over the shards."""
    found: dict[int, float] = {}
    for row in shards:
        for rank, seconds in row["held_seconds"].items():
            found[int(rank)] = found.get(int(rank), 0.0) + seconds
    return found


def _workers(report: Mapping[str, Any], held: Mapping[int, float], rates: Rates) -> Iterator[WorkerSnapshot]:
    present = {row["rank"]: row for row in report["workers"]}
    gone = dict(_gone(report["ended"]))
    for rank in sorted({*range(report["world_size"] or 0), *present, *gone}):
        if rank in present:
            row = present[rank]
            yield WorkerSnapshot(
                state=_state(row, report),
                where=f"{row['host']} pid {row['pid']}",
                holding=_per_second(rates, f"held {rank}", held.get(rank, 0.0)),
                cores=_per_second(rates, f"worker {rank}", row["cpu_seconds"]),
                **{name: row[name] for name in WorkerSnapshot._fields if name in row},
            )
        else:
            missing = gone.get(rank, WorkerSnapshot(rank, "missing"))
            yield missing._replace(replace=report["replace"].get(str(rank), ""))


def _per_second(rates: Rates, name: str, seconds: float) -> float:
    """Returns how fast a time rises, in seconds per second."""
    return rates.of(name, int(1000 * seconds)) / 1000


def _state(row: Mapping[str, Any], report: Mapping[str, Any]) -> WorkerState:
    if not report["started"]:
        return "joined"  # a worker that waits for the start sends no heartbeat
    if overdue(row["seconds_since_heartbeat"], heartbeat_seconds(report["lease_seconds"])):
        return "silent"
    return "blocked" if row["seconds_waiting"] >= HELD_UP else "training"


def _gone(ended: Mapping[str, Any]) -> Iterator[tuple[int, WorkerSnapshot]]:
    for rank in ended["finished"]:
        yield rank, WorkerSnapshot(rank, "finished")
    for rank in ended["preempted"]:
        yield rank, WorkerSnapshot(rank, "stopped")
    for rank, why in ended["failed"].items():
        yield int(rank), WorkerSnapshot(int(rank), "failed", why=why)
    for rank, why in ended["lost"].items():
        yield int(rank), WorkerSnapshot(int(rank), "lost", why=why)


def _shard(row: Mapping[str, Any], lease: float, rates: Rates) -> ShardSnapshot:
    since: float = row["seconds_since_heartbeat"]
    return ShardSnapshot(
        index=row["shard"],
        where=f"{row['host']} pid {row['pid']}",
        rate=rates.of(f"bytes {row['shard']}", row["bytes_in"] + row["bytes_out"]),
        silent=since if overdue(since, heartbeat_seconds(lease)) else 0.0,
        cores=_per_second(rates, f"shard {row['shard']}", row["cpu_seconds"]),
        **{field.name: row[field.name] for field in fields(ShardSnapshot) if field.name in row},
    )
