"""What workers report besides gradients: step, loss, rates, metrics; and what follows from all reports.

They tell how much of a job is done, and whether workers wait for each other without end, because they are in
different operations.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, TypeGuard

from hubring.protos import control_pb2 as pb
from hubring.ps.core.bounds import clean
from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.job.membership import NAMED_RANKS

RATE_WINDOW_SECONDS = 3.0
"""Seconds over which the rate is measured: several heartbeats, but short."""


@dataclass(slots=True)
class StepRate:
    """Steps per second, from completed steps and the times of their reports; 0 before the first window."""

    rate: float = 0.0
    _since: float | None = None
    _from: int = 0

    def note(self, step: int, now: float) -> None:
        """Records the steps completed by `now`, in monotonic seconds. Fewer than before means another job."""
        # A resumed job jumps from 0 to its first step, which is no speed.
        if self._since is None or not self._from or step < self._from:
            self._since, self._from, self.rate = now, step, 0.0
        elif now - self._since >= RATE_WINDOW_SECONDS:
            self.rate = (step - self._from) / (now - self._since)
            self._since, self._from = now, step


MOST_READINGS = 60
"""The speed is that of the last readings, so that it follows a job that becomes slower."""

APART_SECONDS = 1.0
"""Smallest distance of two readings."""


class Completion:
    """The part of a job that is done, from 0 to 1, and its recent speed.

    Law: only readings that differ from the one before count, so a job may report once per epoch. A reading
    below the one before starts over.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque(maxlen=MOST_READINGS)
        self._part: float | None = None

    @property
    def part(self) -> float | None:
        """The part that is done; None if it is not known."""
        return self._part

    def note(self, part: float | None, now: float) -> None:
        """Records the part that is done at `now`, in monotonic seconds."""
        if part is None or (self._part is not None and part < self._part):
            self._readings.clear()
        apart = not self._readings or now - self._readings[-1][0] >= APART_SECONDS
        if part is not None and part != self._part and apart:
            self._readings.append((now, part))
        self._part = part

    def seconds_left(self, now: float) -> float | None:
        """Returns the seconds until the end at the recent speed; None if the speed is not known."""
        if self._part is not None and self._part >= 1.0:
            return 0.0
        if len(self._readings) < 2:
            return None
        (began, first), (at, last) = self._readings[0], self._readings[-1]
        return max(0.0, (1.0 - last) * (at - began) / (last - first) - (now - at))


log = logging.getLogger(__name__)

MOST_METRICS = 12
"""How many metrics of a worker are sent and shown: the first ones that it reported."""

LONGEST_METRIC_NAME = 60
"""Characters of a metric's name; a longer name is cut."""

LONGEST_OPERATION = 120
"""Characters of an operation's name, and of a line of the script; the rest is cut."""

LARGEST_METRIC = 1e300
"""Limit on a metric's absolute value. NaN, infinite and larger values are left out."""

_ELSEWHERE = frozenset({"loss", "samples", "progress", "total_steps", "step"})
"""Reported values that have a place of their own in the status."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A worker's reports, and its process's usage.

    Attributes:
        metrics: Reported numbers by name, and the learning rate.
        samples: Training samples that the script reported so far.
        progress: Part of the job that is done, from 0 to 1; None if the script does not report it.
        cpu_seconds: CPU time of the process since it started.
        memory_bytes: Its resident memory.
        gpu_bytes: GPU memory that torch holds in it.
        operation: What it has waited in for some seconds; empty if it does not wait.
        place: The script's line that waits in it.
        held: Whether the operation certainly waits for other workers.
        total_steps: The step at which training ends; 0 if the script does not report it.
        gpu_use: Part of the last moments in which its GPUs computed, from 0 to 1; None if it is not known.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    progress: float | None = None
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    gpu_bytes: int = 0
    operation: str = ""
    place: str = ""
    held: bool = False
    total_steps: int = 0
    gpu_use: float | None = None

    def to_proto(self) -> pb.Telemetry:
        sent = asdict(self)
        return pb.Telemetry(cpu_ns=round(1e9 * sent.pop("cpu_seconds")), **sent)


class TelemetryExporter:
    """Takes telemetry for heartbeats. Its errors stay here: a worker without heartbeats would be lost."""

    def __init__(self) -> None:
        self._warned = False

    def export(self, take: Callable[[], Telemetry]) -> pb.Telemetry:
        """Returns the telemetry, or an empty one if it cannot be taken or sent; logs the first error."""
        try:
            return take().to_proto()
        except Exception as error:
            if not self._warned:
                log.warning("the server does not get this worker's metrics: %s", error, exc_info=True)
            self._warned = True
            return pb.Telemetry()


def from_proto(message: pb.Telemetry) -> Telemetry:
    """Returns a peer's telemetry. Whatever the peer sent, metrics are finite and bounded in number."""
    return Telemetry(
        metrics=shown(
            (clean(name, LONGEST_METRIC_NAME), value) for name, value in sorted(message.metrics.items())
        ),
        samples=message.samples,
        progress=_share(message.progress) if message.HasField("progress") else None,
        cpu_seconds=message.cpu_ns / 1e9,
        memory_bytes=message.memory_bytes,
        gpu_bytes=message.gpu_bytes,
        operation=clean(message.operation, LONGEST_OPERATION),
        place=clean(message.place, LONGEST_OPERATION),
        held=message.held,
        total_steps=message.total_steps,
        gpu_use=_share(message.gpu_use) if message.HasField("gpu_use") else None,
    )


def shown(metrics: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Returns the first `MOST_METRICS` numbers that have no place of their own in the status."""
    found = (
        (name[:LONGEST_METRIC_NAME], float(value))
        for name, value in metrics
        if name not in _ELSEWHERE and _is_number(value)
    )
    return dict(islice(found, MOST_METRICS))


def reported_progress(reported: Mapping[str, Any], step: int) -> float | None:
    """Returns the part of the job that is done.

    Args:
        reported: The script's last value of each metric. `progress` is from 0 to 1; without it,
            `total_steps` is the step at which training ends.
        step: Completed steps.
    """
    share, total = reported.get("progress"), reported_total(reported)
    if share is not None:
        return _share(share)
    return min(1.0, step / total) if total else None


def reported_total(reported: Mapping[str, Any]) -> int:
    """Returns the step at which training ends; 0 if the script does not report it."""
    total = reported.get("total_steps")
    return int(total) if _is_number(total) and 0 < total < 2**63 else 0


def _share(value: Any) -> float | None:
    return float(value) if _is_number(value) and 0 <= value <= 1 else None


def _is_number(value: Any) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST_METRIC < value < LARGEST_METRIC
    )


HELD_UP = 2.0
"""Seconds of waiting after which a worker counts as blocked by another worker, not as slow itself."""


@dataclass(slots=True)
class Progress:
    """What a worker reported last."""

    step: int = 0
    loss: float = float("nan")
    heard: float = 0.0
    waiting: float = 0.0
    """Seconds that the worker had been blocked when it sent the report."""
    step_rate: StepRate = field(default_factory=StepRate)
    sample_rate: StepRate = field(default_factory=StepRate)
    telemetry: Telemetry = field(default_factory=Telemetry)


SURE_SECONDS = 7.0
"""How long all must be held. A worker asks its shards every 5 or 6 s whether an answer is on its way."""

FIRST_MEANS = "first gradients"
"""In the names of the operations in which ranks wait after the backward passes of their first step."""


class Standstill:
    """Watches the last report of each member.

    Law: a job stands still if every member waits, and they wait in at least two operations. A worker says of
    its operation that it is held if other workers must take part, and nothing of it is on its way. If all are
    held, and stay so while workers ask again, they can never meet. All waits must have one moment in common,
    since workers report at different times.

    Args:
        tell: Called once with what each member is in, when they have come to stand still.
        fail: Called if they can never meet.
    """

    def __init__(self, tell: Callable[[str], None], fail: Callable[[HubringError], None]) -> None:
        self._tell, self._fail = tell, fail
        self._told = False
        self._held_from: float | None = None

    def look(self, progress: Mapping[int, Progress], now: float) -> None:
        """Looks at the members' reports, by rank."""
        sent = [one.telemetry for one in progress.values()]
        began = max((one.heard - one.waiting for one in progress.values()), default=0.0)
        meet = began < min((one.heard for one in progress.values()), default=0.0)
        if not (meet and all(one.operation for one in sent) and len({one.operation for one in sent}) > 1):
            self._told, self._held_from = False, None
            return
        if not all(one.held for one in sent):
            self._held_from = None
        elif self._held_from is None:
            self._held_from = now
        elif now - self._held_from >= SURE_SECONDS:
            self._fail(ConfigError(_text(progress)))
        if not self._told:
            self._told = True
            text = _text(progress)
            log.warning("%s", text)
            self._tell(text)


def _text(progress: Mapping[int, Progress]) -> str:
    """Returns which ranks wait in which operation, and the fix."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, one in progress.items():
        ranks.setdefault((one.telemetry.operation, one.telemetry.place), []).append(rank)
    parts = []
    for (operation, place), some in ranks.items():
        names = f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some[:NAMED_RANKS]))}"
        more = " and more" if len(some) > NAMED_RANKS else ""
        where = f" ({place})" if place else ""
        parts.append(f"{names}{more} for {progress[some[0]].waiting:.0f} s in {operation}{where}")
    fix = "Call the same operations on all ranks, in the same order"
    if any(FIRST_MEANS in operation for operation, _ in ranks):
        fix += ". In the first step, all ranks must run backward equally often"
    return f"all workers wait, in different operations: {'; '.join(parts)}. {fix}"
