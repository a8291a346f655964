"""What survives the death of a coordinator's process.

Law: a record's fields are attributes of the object that it records, private ones without their underscore.
What is missing here begins anew: leases, speeds, open calls, and the last report of each worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from msgspec import Struct, defstruct

from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.coordinator.agreed_model import Buckets
from hubring.ps.coordinator.shard_fleet import Shard
from hubring.ps.core.types import Member, Sender, ShardPlan, Slicing
from hubring.ps.job.generations import Generation
from hubring.ps.job.membership import Departure
from hubring.ps.job.outcome import Outcome
from hubring.ps.job.uneven_batches import Finish
from hubring.ps.job.verdict import Verdict
from hubring.ps.process.process import Process
from hubring.ps.security.keyring import Kept

LIVE = ("channel", "stub", "heard", "returns_by", "last_stats", "dismissed")
"""The attributes of a shard that belong to this process."""


class Failure(Struct):
    """An error that ended a job, a server or a save."""

    exit_code: int
    text: str


class LeaseRecord(Struct):
    """As `Lease`."""

    member: Member
    token: str
    active: bool
    waits: bool


class MembershipRecord(Struct):
    """As `Membership`."""

    world_size: int
    next_incarnation: int
    complete: bool
    finished: str
    epoch: int
    tokens: dict[str, Member]
    departed: dict[int, Departure]


class JobRecord(Struct):
    """As `Job`."""

    name: str
    topology: str
    outcome: Outcome
    draining: bool
    stop_after: int
    heard_stop: set[int]
    first_incarnation: int
    finish: Finish | None
    warned: bool
    news: dict[int, list[str]]


class GenerationsRecord(Struct):
    """As `Generations`; the members of a meeting come again."""

    least: int
    current: Generation
    pause: float


class ModelRecord(Struct):
    """As `AgreedModel`."""

    buckets: Buckets
    plan: ShardPlan
    settled: bool
    restored: tuple[Path, Manifest] | None
    slicing: Slicing
    joined: tuple[int, ...]
    trial: tuple[Buckets, int] | None


class BoardRecord(Struct):
    """As `Rendezvous`."""

    values: dict[str, str]
    writers: dict[str, int]
    keys: Counter[int]
    bytes: Counter[int]


class ScheduleRecord(Struct):
    """As `CheckpointSchedule`."""

    last: Path | None
    written: int
    tried_at: float
    saved_at: float


class CountersRecord(Struct):
    """As `JobCounters`."""

    jobs: Counter[str]
    workers: Counter[str]


class CoordinatorRecord(Struct):
    """As `Coordinator`."""

    stopping: bool
    judged: bool
    last_job: str
    last_step: int
    last_stats: list[dict[str, Any]]
    next_incarnation: int


def _of_a_shard() -> type[Struct]:
    hints = get_type_hints(Shard, localns={"ShardControlAsyncStub": object})
    kept = [field.name for field in fields(Shard) if field.name not in LIVE]
    return defstruct("ShardRecord", [(name, hints[name]) for name in kept], module=__name__)


ShardRecord = _of_a_shard()
"""As `Shard`, without what is `LIVE`."""


class DeparturesRecord(Struct):
    """As `Departures`."""

    waiting: set[Sender]


class RejectionsRecord(Struct):
    """As `Rejections`."""

    counts: Counter[str]


class EndedRecord(Struct):
    """As `EndedJobs`."""

    ended: list[tuple[dict[int, Departure], Verdict]]


class TakeoverRecord(Struct):
    """As `Takeover`."""

    failovers: int


class StandbysRecord(Struct):
    """As `Standbys`."""

    failovers: int
    dismissed: dict[str, str]


class FleetRecord(Struct):
    """As `Fleet`, without its shards."""

    guarded: bool
    departed: set[int]


class ReporterRecord(Struct):
    """As `Reporter`. Monotonic seconds are the same for all processes of a host."""

    began: float


class HubRecord(Struct):
    """A coordinator and its parts."""

    coordinator: CoordinatorRecord
    job: JobRecord
    generations: GenerationsRecord
    model: ModelRecord
    board: BoardRecord
    checkpoints: ScheduleRecord
    counters: CountersRecord
    departures: DeparturesRecord
    ended: EndedRecord
    rejections: RejectionsRecord
    takeover: TakeoverRecord
    standbys: StandbysRecord
    fleet: FleetRecord
    reporter: ReporterRecord
    membership: MembershipRecord | None
    leases: list[LeaseRecord]
    shards: list[ShardRecord]  # type: ignore[valid-type]
    """With the standbys."""
    failures: dict[str, Failure]
    """By what failed: `job`, `server` or `checkpoints`."""
    once: bool
    saving: bool
    done: bool
    lost: bool
    """Whether the job has lost a shard."""
    outcome: Outcome | None


class PageRecord(Struct):
    """The status page's port and token."""

    port: int
    token: str


class ChildRecord(Struct):
    """As `Child`."""

    name: str
    process: Process


class ServerRecord(Struct):
    """What a server has beside its coordinator."""

    port: int
    signals: list[int]
    page: PageRecord | None
    keyring: Kept | None
    shards: list[ChildRecord]


class State(Struct):
    """A server's whole state.

    Attributes:
        steps: Completed steps by rank. They alone do not make a state worth writing: workers send them again.
    """

    server: ServerRecord
    hub: HubRecord
    steps: dict[int, int]
