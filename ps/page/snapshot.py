"""What there is to see of a hub at one time, worked out from its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from hubring.ps.job.job import HELD_UP
from hubring.ps.job.membership import heartbeat_seconds
from hubring.ps.observe.journal import LogEntry
from hubring.ps.page.history import Sample
from hubring.ps.page.rates import Rates

LATE_SECONDS = 0.5
"""How late a heartbeat may be until its sender counts as silent: with the page's own delay, whoever stops is
seen to be silent within 2 seconds."""

State = Literal["training", "held up", "silent", "joined", "missing", "finished", "stopped", "failed", "lost"]
STATES: tuple[State, ...] = get_args(State)

_SAID: Mapping[State, str] = {
    "joined": "waits for the start",
    "missing": "not there",
    "stopped": "stopped, as asked",
}
"""Those whose name does not say it all."""


class Worker(NamedTuple):
    """One place in the job, and who holds it or held it last.

    Attributes:
        rank: Its number.
        state: How its holder does.
        where: Its host and process; empty where nobody holds the place.
        step: Steps it has completed.
        loss: As it last reported.
        rate: Steps a second, lately.
        waiting: Seconds for which it has been held up.
        silent: Seconds since its last heartbeat.
        holding: Seconds a second, lately, for which shards held answers to it back; there may be several.
        why: How it came to its end, where that was no good one.
    """

    rank: int
    state: State
    where: str = ""
    step: int = 0
    loss: float | None = None
    rate: float = 0.0
    waiting: float = 0.0
    silent: float = 0.0
    holding: float = 0.0
    why: str = ""

    @property
    def present(self) -> bool:
        """Whether somebody holds the place."""
        return bool(self.where)

    @property
    def doing(self) -> str:
        """Its state in words."""
        if self.state == "silent":
            return f"silent for {int(self.silent)} s"
        if self.state == "held up":
            return f"held up for {int(self.waiting)} s"
        said = _SAID.get(self.state, self.state)
        return f"{said}: {self.why}" if self.why else said


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard; bytes and pushes are since its job began.

    Attributes:
        index: Its number.
        where: Its host and process.
        bytes_in: Gradients that came.
        bytes_out: Parameters that went.
        rate: Bytes a second, both ways, lately.
        keys: Slices that it holds.
        oldest: Lowest version of any of its keys.
        newest: Highest.
        pushes: Gradients that counted.
        dropped: Those too late for their round.
        silent: Seconds since its last heartbeat, where that is overdue; else 0.
    """

    index: int
    where: str
    bytes_in: int
    bytes_out: int
    rate: float
    keys: int
    oldest: int
    newest: int
    pushes: int
    dropped: int
    silent: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the page shows.

    Attributes:
        report: As of `Coordinator.status`.
        workers: In rank order.
        shards: In order of their numbers.
        troubles: Why shards do not tell of themselves.
        samples: The job's course so far.
        entries: The log, the oldest line first.
    """

    report: Mapping[str, Any]
    workers: tuple[Worker, ...]
    shards: tuple[Shard, ...]
    troubles: tuple[str, ...]
    samples: tuple[Sample, ...]
    entries: tuple[LogEntry, ...]

    @staticmethod
    def of(
        report: Mapping[str, Any], rates: Rates, samples: Sequence[Sample], entries: Sequence[LogEntry]
    ) -> Snapshot:
        """Works it out; `rates` has seen the reports before."""
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
    def present(self) -> list[Worker]:
        """Who takes part."""
        return [worker for worker in self.workers if worker.present]

    @property
    def silent(self) -> list[Worker]:
        """Who should have been heard of by now."""
        return [worker for worker in self.workers if worker.state == "silent"]

    @property
    def counts(self) -> dict[State, int]:
        """How many are in which state; states that nobody is in are left out."""
        found = Counter(worker.state for worker in self.workers)
        return {state: found[state] for state in STATES if found[state]}

    @property
    def staleness(self) -> dict[int, int]:
        """How many pushes were applied at each staleness, on all shards together."""
        found: Counter[int] = Counter()
        for row in self.report["shards"]:
            found.update({int(steps): count for steps, count in row["staleness"].items()})
        return dict(sorted(found.items()))


def states(report: Mapping[str, Any]) -> dict[int, State]:
    """In which state everybody is who takes part, by rank: what somebody watching wants to see at once."""
    return {row["rank"]: _state(row, report) for row in report["workers"]}


def overdue(seconds: float, every: float) -> bool:
    """Whether somebody who beats every so many seconds should have been heard again."""
    return seconds > every + LATE_SECONDS


def _held(shards: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds by rank for which answers were held back, on all shards together."""
    found: dict[int, float] = {}
    for row in shards:
        for rank, seconds in row["held_seconds"].items():
            found[int(rank)] = found.get(int(rank), 0.0) + seconds
    return found


def _workers(report: Mapping[str, Any], held: Mapping[int, float], rates: Rates) -> Iterator[Worker]:
    present = {row["rank"]: row for row in report["workers"]}
    gone = dict(_gone(report["ended"]))
    for rank in sorted({*range(report["world_size"] or 0), *present, *gone}):
        if rank in present:
            row = present[rank]
            yield Worker(
                rank=rank,
                state=_state(row, report),
                where=f"{row['host']} pid {row['pid']}",
                step=row["step"],
                loss=row["loss"],
                rate=row["steps_per_second"],
                waiting=row["seconds_waiting"],
                silent=row["seconds_since_heartbeat"],
                holding=rates.of(f"held {rank}", int(1000 * held.get(rank, 0.0))) / 1000,
            )
        else:
            yield gone.get(rank, Worker(rank, "missing"))


def _state(row: Mapping[str, Any], report: Mapping[str, Any]) -> State:
    if not report["started"]:
        return "joined"  # whoever waits for the others sends no heartbeat
    if overdue(row["seconds_since_heartbeat"], heartbeat_seconds(report["lease_seconds"])):
        return "silent"
    return "held up" if row["seconds_waiting"] >= HELD_UP else "training"


def _gone(ended: Mapping[str, Any]) -> Iterator[tuple[int, Worker]]:
    for rank in ended["finished"]:
        yield rank, Worker(rank, "finished")
    for rank in ended["preempted"]:
        yield rank, Worker(rank, "stopped")
    for rank, why in ended["failed"].items():
        yield int(rank), Worker(int(rank), "failed", why=why)
    for rank, why in ended["lost"].items():
        yield int(rank), Worker(int(rank), "lost", why=why)


def _shard(row: Mapping[str, Any], lease: float, rates: Rates) -> Shard:
    since: float = row["seconds_since_heartbeat"]
    every = lease / 5  # a shard's heartbeat has no upper bound of a second
    return Shard(
        index=row["shard"],
        where=f"{row['host']} pid {row['pid']}",
        bytes_in=row["bytes_in"],
        bytes_out=row["bytes_out"],
        rate=rates.of(f"bytes {row['shard']}", row["bytes_in"] + row["bytes_out"]),
        keys=row["keys"],
        oldest=row["oldest_version"],
        newest=row["newest_version"],
        pushes=row["pushes"],
        dropped=row["dropped"],
        silent=since if overdue(since, every) else 0.0,
    )
