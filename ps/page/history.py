"""History: the course of a job, in a bounded number of samples.

Law: samples come at equal distances; once there are too many, every second one
goes and the distance doubles, so that they span the whole job whatever its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MOST = 240
"""Samples; about as many as a drawing has room for."""

EVERY_SECONDS = 1.0
"""Between two samples, at first."""

EARLY = 0.9
"""Whoever samples comes a little early at times: this share of the distance is enough."""


class Sample(NamedTuple):
    """How a job went at one time."""

    seconds: float
    """Since the server began."""
    step: int
    """Steps that all who take part have completed."""
    loss: float | None
    """Mean over the workers that report a finite one."""
    rate: float
    """Steps a second, of all workers together."""


class History:
    """Keeps one job's samples until another begins."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._every = EVERY_SECONDS
        self._over = False

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The oldest first."""
        return tuple(self._samples)

    def note(self, report: Mapping[str, Any]) -> None:
        """Takes a sample if it is time for one.

        Args:
            report: What `Coordinator.report` tells; its shards are not looked at.
        """
        if not report["job"]:
            self._over = True
            return
        if self._over:
            self._samples.clear()
            self._every, self._over = EVERY_SECONDS, False
        now: float = report["seconds_up"]
        if report["started"] and report["workers"] and self._due(now):
            self._samples.append(sample(report))
            if len(self._samples) > MOST:
                del self._samples[1::2]
                self._every *= 2

    def _due(self, now: float) -> bool:
        return not self._samples or now - self._samples[-1].seconds >= EARLY * self._every


def sample(report: Mapping[str, Any]) -> Sample:
    """What a report tells of the job as a whole."""
    losses = [worker["loss"] for worker in report["workers"] if worker["loss"] is not None]
    return Sample(
        report["seconds_up"],
        report["step"],
        sum(losses) / len(losses) if losses else None,
        sum(worker["steps_per_second"] for worker in report["workers"]),
    )
