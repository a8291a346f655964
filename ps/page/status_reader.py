"""Reads the hub's current status, and keeps samples of a job's progress, bounded in number.

Law: samples are equally spaced. When there are too many, every second one is deleted and the spacing
doubles. The samples therefore always span the whole job.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from hubring.ps.coordinator.status import StatusReporter
from hubring.ps.job.telemetry import MOST_METRICS

MOST_SAMPLES = 240
"""Largest number of samples; about as many as a chart can show."""

SAMPLE_SECONDS = 1.0
"""Initial spacing of samples."""

EARLY_SAMPLE_SECONDS = 0.1
"""How early a sample may be, because timers are not exact."""


class ProgressSample(NamedTuple):
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
        self._samples: list[ProgressSample] = []
        self._every = SAMPLE_SECONDS
        self._over = False

    @property
    def samples(self) -> tuple[ProgressSample, ...]:
        """The samples, oldest first."""
        return tuple(self._samples)

    def note(self, report: Mapping[str, Any]) -> None:
        """Takes a sample if one is due.

        Args:
            report: From `StatusReporter.report`; its shards are not used.
        """
        if not report["job"]:
            self._over = True
            return
        if self._over:
            self._samples.clear()
            self._every, self._over = SAMPLE_SECONDS, False
        now: float = report["seconds_up"]
        due = not self._samples or now - self._samples[-1].seconds >= self._every - EARLY_SAMPLE_SECONDS
        # A job that resumes reports step 0 at first; one whose script has its own optimizer, always.
        begun = report["step"] or any(worker["loss"] is not None for worker in report["workers"])
        if report["started"] and report["workers"] and begun and due:
            self._samples.append(progress_sample(report))
            if len(self._samples) > MOST_SAMPLES:
                del self._samples[1::2]
                self._every *= 2


def progress_sample(report: Mapping[str, Any]) -> ProgressSample:
    """Summarizes a report as one sample."""
    losses = [worker["loss"] for worker in report["workers"] if worker["loss"] is not None]
    metrics: defaultdict[str, list[float]] = defaultdict(list)
    for worker in report["workers"]:
        for name, value in worker["metrics"].items():
            metrics[name].append(value)
    means = ((name, sum(values) / len(values)) for name, values in metrics.items())
    return ProgressSample(
        report["seconds_up"],
        report["step"],
        sum(losses) / len(losses) if losses else None,
        sum(worker["steps_per_second"] for worker in report["workers"]),
        sum(worker["samples_per_second"] for worker in report["workers"]),
        tuple(sorted(means)[:MOST_METRICS]),
    )


SHARD_SECONDS = 0.2
"""How long the page waits for the shards' reports. A stopped shard must not delay the rest."""


class StatusReader:
    """Reads one hub. Concurrent readers share one request to the shards.

    Args:
        reporter: Tells the hub's status.
    """

    def __init__(self, reporter: StatusReporter) -> None:
        self._reporter = reporter
        self._asking: asyncio.Task[None] | None = None
        self._known: list[dict[str, Any]] = []

    async def read(self, patience: float = SHARD_SECONDS) -> dict[str, Any]:
        """Returns the report of `StatusReporter.status`. Slow shards appear with their last report.

        Args:
            patience: Seconds to wait for the shards.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        asking = self._asking
        await asyncio.wait([asking], timeout=patience)
        if asking.done() and not asking.cancelled():  # cancelled: a shard was dismissed during the request
            asking.result()
        return self._reporter.report(self._known)

    async def _ask(self) -> None:
        self._known = await self._reporter.shards()

    def workers(self) -> dict[str, Any]:
        """Returns the report without shards, and sends no request to them."""
        return self._reporter.report([])

    async def close(self) -> None:
        """Cancels the request to the shards."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
