"""Takes the state of a coordinator, and gives it to another one."""

from __future__ import annotations

from collections import deque
from functools import reduce
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.core.errors import BY_EXIT_CODE, HubringError, JobFailed
from hubring.ps.job.membership import Lease, Membership
from hubring.ps.job.progress import Progress
from hubring.ps.recovery import records
from hubring.ps.recovery.records import HubRecord, State

_T = TypeVar("_T", bound=Struct)

PARTS: dict[str, tuple[type[Struct], str]] = {
    "coordinator": (records.CoordinatorRecord, ""),
    "job": (records.JobRecord, "job"),
    "generations": (records.GenerationsRecord, "job.generations"),
    "model": (records.ModelRecord, "agreed_model"),
    "board": (records.BoardRecord, "rendezvous"),
    "checkpoints": (records.ScheduleRecord, "checkpoints"),
    "counters": (records.CountersRecord, "counters"),
    "departures": (records.DeparturesRecord, "departures"),
    "ended": (records.EndedRecord, "departures.ended"),
    "rejections": (records.RejectionsRecord, "counters.rejections"),
    "takeover": (records.TakeoverRecord, "takeover"),
    "standbys": (records.StandbysRecord, "standbys"),
    "fleet": (records.FleetRecord, "fleet"),
    "reporter": (records.ReporterRecord, "reporter"),
}
"""The record of each part of a coordinator, and where the part is."""


def capture(hub: Coordinator) -> HubRecord:
    """Returns what another process needs to continue as this coordinator; it shares memory with it."""
    membership = hub.job.membership
    failures = {"job": hub.job.failure, "server": hub.failure, "checkpoints": hub.checkpoints.failure}
    parts: dict[str, Any] = {name: _taken(kind, part(hub, path)) for name, (kind, path) in PARTS.items()}
    leases = {} if membership is None else _value(membership, "leases")
    return HubRecord(
        **parts,
        membership=None if membership is None else _taken(records.MembershipRecord, membership),
        leases=[_taken(records.LeaseRecord, lease) for lease in leases.values()],
        shards=[_taken(records.ShardRecord, shard) for shard in hub.fleet.processes],
        failures={
            what: records.Failure(error.exit_code, str(error))
            for what, error in failures.items()
            if error is not None
        },
        once=hub.config.once,
        saving=hub.checkpoints.saving,
        done=hub.done.is_set(),
        lost=_value(hub.shutdown, "lost").is_set(),
        outcome=hub.outcome,
    )


def steps(hub: Coordinator) -> dict[int, int]:
    """Returns the completed steps of each rank."""
    return {rank: progress.step for rank, progress in hub.job.progress.items()}


def restore(hub: Coordinator, state: State, now: float) -> None:
    """Gives a state to a new coordinator. All leases begin `now`, in monotonic seconds."""
    record = state.hub
    hub.config = replace(hub.config, once=record.once)
    for name, (_, path) in PARTS.items():
        _give(getattr(record, name), part(hub, path))
    if record.membership is not None:
        membership = Membership(record.membership.world_size, _value(hub.job, "lease"))
        _give(record.membership, membership)
        _value(membership, "leases").update(
            {lease.member.rank: Lease(**asdict(lease), beaten=now) for lease in record.leases}
        )
        hub.job.membership = membership
    hub.job.progress.update({rank: Progress(step, heard=now) for rank, step in state.steps.items()})
    for shard in record.shards:
        hub.fleet.add(asdict(shard), now)
    errors = {
        what: BY_EXIT_CODE.get(failure.exit_code, HubringError)(failure.text)
        for what, failure in record.failures.items()
    }
    hub.job.failure, hub.checkpoints.failure = errors.get("job"), errors.get("checkpoints")
    if "server" in record.failures:
        hub.shutdown.failure = JobFailed(record.failures["server"].text)
    if record.done:
        hub.done.set()
    if record.lost:
        _value(hub.shutdown, "lost").set()
    hub.outcome = record.outcome
    if record.coordinator.judged:
        hub.outcome = hub.job.outcome
        hub.counters.counted = hub.job.outcome


def part(hub: Coordinator, path: str) -> object:
    """Returns the part of a coordinator at a path of `PARTS`."""
    return reduce(_value, filter(None, path.split(".")), hub)


def _value(source: object, name: str) -> Any:
    return getattr(source, _attribute(source, name))


def _attribute(source: object, name: str) -> str:
    return f"_{name}" if hasattr(source, f"_{name}") else name


def _taken(kind: type[_T], source: object) -> _T:
    return kind(**{name: _value(source, name) for name in kind.__struct_fields__})


def _give(record: Struct, target: object) -> None:
    for name, value in asdict(record).items():
        current = _value(target, name)
        if isinstance(current, dict):  # may be a Counter or a defaultdict
            current.clear()
            current.update(value)
        elif isinstance(current, deque):
            current.clear()
            current.extend(value)
        else:
            setattr(target, _attribute(target, name), value)
