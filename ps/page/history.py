"""History: samples of a job's progress, bounded in number.

Law: samples are equally spaced. When there are too many, every second one is deleted and the spacing doubles.
The samples therefore always span the whole job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from hubring.ps.job.telemetry import MOST_METRICS

MOST = 240
"""Largest number of samples; about as many as a chart can show."""

EVERY_SECONDS = 1.0
"""Initial spacing of samples."""

EARLY_SECONDS = 0.1
"""How early a sample may be, because timers are not exact."""


class Sample(NamedTuple):
    """A job's progress at one time."""

    seconds: float
    """Seconds since the server started."""
    step: int
    """Steps that all workers in the job have completed."""
    loss: float | None
    """Mean over the workers that report a finite loss."""
    rate: float
    """Steps per second, summed over all workers."""
    samples_rate: float = 0.0
    """Training samples per second, summed over all workers; 0 if the script does not report them."""
    metrics: tuple[tuple[str, float], ...] = ()
    """By name, the mean of each metric over the workers that report it."""


class History:
    """The samples of one job, until the next job begins."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._every = EVERY_SECONDS
        self._over = False

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples, oldest first."""
        return tuple(self._samples)

    def note(self, report: Mapping[str, Any]) -> None:
        """Takes a sample if one is due.

        Args:
            report: From `Coordinator.report`; its shards are not used.
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
        return not self._samples or now - self._samples[-1].seconds >= self._every - EARLY_SECONDS


def sample(report: Mapping[str, Any]) -> Sample:
    """Summarizes a report as one sample."""
    losses = [worker["loss"] for worker in report["workers"] if worker["loss"] is not None]
    metrics: defaultdict[str, list[float]] = defaultdict(list)
    for worker in report["workers"]:
        for name, value in worker["metrics"].items():
            metrics[name].append(value)
    means = ((name, sum(values) / len(values)) for name, values in metrics.items())
    return Sample(
        report["seconds_up"],
        report["step"],
        sum(losses) / len(losses) if losses else None,
        sum(worker["steps_per_second"] for worker in report["workers"]),
        sum(worker["samples_per_second"] for worker in report["workers"]),
        tuple(sorted(means)[:MOST_METRICS]),
    )
