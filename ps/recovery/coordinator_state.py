"""What survives the death of a coordinator's process: takes its state, and gives it to another one.

Law: a part of a coordinator with several such fields inherits them from a dataclass; the other parts' are
fields of `HubRecord`, which `capture` and `restore` name one by one. What is in neither starts again: leases,
speeds, open calls, and the last report of each worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.coordinator.agreed_model import ModelState
from hubring.ps.coordinator.checkpoints import ScheduleState
from hubring.ps.coordinator.coordinator import Coordinator, CoordinatorState
from hubring.ps.coordinator.regroup_service import BoardState
from hubring.ps.coordinator.shard_fleet import ShardState
from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import BY_EXIT_CODE, HubringError, JobFailed
from hubring.ps.core.types import Sender
from hubring.ps.job.generations import GenerationsState
from hubring.ps.job.job import JobState
from hubring.ps.job.membership import MembershipState, Place
from hubring.ps.job.outcome import EndedJob
from hubring.ps.job.telemetry import Progress
from hubring.ps.process.child import Process
from hubring.ps.security.keyring import KeyringContent

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Part = TypeVar("Part", bound=DataclassInstance)


class FailureRecord(Struct):
    """An error that ended a job, a server or a save."""

    exit_code: int
    text: str

    @classmethod
    def of(cls, error: HubringError | None) -> FailureRecord | None:
        """Returns the record of an error, if there is one."""
        return None if error is None else cls(error.exit_code, str(error))

    @property
    def error(self) -> HubringError:
        """The error."""
        return BY_EXIT_CODE.get(self.exit_code, HubringError)(self.text)


class HubRecord(Struct):
    """A coordinator and its parts.

    Attributes:
        places: The places of `membership`.
        shards: With the standbys.
        lost: Whether the job has lost a shard.
    """

    coordinator: CoordinatorState
    job: JobState
    generations: GenerationsState
    model: ModelState
    board: BoardState
    checkpoints: ScheduleState
    membership: MembershipState | None
    places: list[Place]
    shards: Sequence[ShardState]
    jobs: dict[str, int]
    workers: dict[str, int]
    rejections: dict[str, int]
    waiting: set[Sender]
    ended: list[EndedJob]
    takeovers: int
    promotions: int
    dismissed: dict[str, str]
    departed: set[tuple[str, int]]
    guarded: bool
    once: bool
    saving: bool
    done: bool
    lost: bool
    job_failure: FailureRecord | None
    server_failure: FailureRecord | None
    unsaved: FailureRecord | None


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
    keyring: KeyringContent | None
    shards: list[ChildRecord]


class ServerState(Struct):
    """A server's whole state.

    Attributes:
        steps: Completed steps by rank. They alone do not make a state worth writing: workers send them again.
    """

    server: ServerRecord
    hub: HubRecord
    steps: dict[int, int]


def capture(hub: Coordinator) -> HubRecord:
    """Returns what another process needs to continue as this coordinator; it shares memory with it."""
    job, fleet, counters = hub.job, hub.fleet, hub.counters
    return HubRecord(
        coordinator=hub,
        job=job,
        generations=job.generations,
        model=hub.agreed_model,
        board=hub.rendezvous,
        checkpoints=hub.checkpoints,
        membership=job.membership,
        places=job.membership.places if job.membership is not None else [],
        shards=fleet.processes,
        jobs=counters.jobs,
        workers=counters.workers,
        rejections=counters.rejections.counts(),
        waiting=hub.departures.waiting,
        ended=hub.departures.ended,
        takeovers=hub.takeovers,
        promotions=hub.standbys.failovers,
        dismissed=hub.standbys.dismissed,
        departed=fleet.departed,
        guarded=fleet.guarded,
        once=hub.config.once,
        saving=hub.checkpoints.saving,
        done=hub.done.is_set(),
        lost=hub.shutdown.lost.is_set(),
        job_failure=FailureRecord.of(job.failure),
        server_failure=FailureRecord.of(hub.failure),
        unsaved=FailureRecord.of(hub.checkpoints.failure),
    )


def steps_of(hub: Coordinator) -> dict[int, int]:
    """Returns the completed steps of each rank."""
    return {rank: progress.step for rank, progress in hub.job.progress.items()}


def restore(hub: Coordinator, state: ServerState, now: float) -> None:
    """Gives a state to a new coordinator, before it serves. All leases begin `now`, in monotonic seconds."""
    known, job, fleet, counters = state.hub, hub.job, hub.fleet, hub.counters
    hub.config = replace(hub.config, once=known.once)
    _give(known.coordinator, hub)
    _give(known.job, job)
    _give(known.generations, job.generations)
    _give(known.model, hub.agreed_model)
    _give(known.board, hub.rendezvous)
    _give(known.checkpoints, hub.checkpoints)
    if known.membership is not None:
        job.resume(known.membership.world_size, known.places, now)
        assert job.membership is not None
        _give(known.membership, job.membership)
    job.progress.update({rank: Progress(step, heard=now) for rank, step in state.steps.items()})
    for shard in known.shards:
        fleet.add(shard, now)
    fleet.guarded, fleet.departed = known.guarded, known.departed
    counters.jobs.update(known.jobs)
    counters.workers.update(known.workers)
    counters.rejections = Rejections(known.rejections)
    hub.departures.waiting, hub.departures.ended = known.waiting, known.ended
    hub.takeovers, hub.standbys.failovers = known.takeovers, known.promotions
    hub.standbys.dismissed = known.dismissed
    job.failure = known.job_failure.error if known.job_failure else None
    hub.checkpoints.failure = known.unsaved.error if known.unsaved else None
    hub.shutdown.failure = JobFailed(known.server_failure.text) if known.server_failure else None
    if known.done:
        hub.done.set()
    if known.lost:
        hub.shutdown.lost.set()
    if hub.judged:
        hub.outcome = counters.counted = job.outcome


def _give(state: Part, part: Part) -> None:
    """Gives a state to the part that inherits from its class."""
    for field in fields(state):
        setattr(part, field.name, getattr(state, field.name))
