"""Telemetry: what a worker's heartbeat carries for people, besides its step and its loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard

from hubring.protos import control_pb2 as pb
from hubring.ps.core.peer_text import clean

log = logging.getLogger(__name__)

MOST_METRICS = 12
"""How many metrics of a worker are sent and shown: the first ones that it reported."""

LONGEST_NAME = 60
"""Characters of a metric's name; a longer name is cut."""

LARGEST = 1e300
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
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    progress: float | None = None
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    gpu_bytes: int = 0

    def to_proto(self) -> pb.Telemetry:
        return pb.Telemetry(
            metrics=self.metrics,
            samples=self.samples,
            progress=self.progress,
            cpu_ns=round(1e9 * self.cpu_seconds),
            memory_bytes=self.memory_bytes,
            gpu_bytes=self.gpu_bytes,
        )


class Exporter:
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
        metrics=shown((clean(name, LONGEST_NAME), value) for name, value in sorted(message.metrics.items())),
        samples=message.samples,
        progress=_share(message.progress) if message.HasField("progress") else None,
        cpu_seconds=message.cpu_ns / 1e9,
        memory_bytes=message.memory_bytes,
        gpu_bytes=message.gpu_bytes,
    )


def shown(metrics: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Returns the first `MOST_METRICS` numbers that have no place of their own in the status."""
    found = (
        (name[:LONGEST_NAME], float(value))
        for name, value in metrics
        if name not in _ELSEWHERE and _is_number(value)
    )
    return dict(islice(found, MOST_METRICS))


def progress(reported: Mapping[str, Any], step: int) -> float | None:
    """Returns the part of the job that is done.

    Args:
        reported: The script's last value of each metric. `progress` is from 0 to 1; without it,
            `total_steps` is the step at which training ends.
        step: Completed steps.
    """
    share, total = reported.get("progress"), reported.get("total_steps")
    if share is not None:
        return _share(share)
    return min(1.0, step / total) if _is_number(total) and total > 0 else None


def _share(value: Any) -> float | None:
    return float(value) if _is_number(value) and 0 <= value <= 1 else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST
