"""The goal of an experiment: its metric and the target."""

from __future__ import annotations

from dataclasses import dataclass

from hubring.workers.compare.result.findings import Findings


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of the experiment.

    Attributes:
        job: Name of the job.
        title: The metric in words.
        samples: Word for the samples.
        target: Value of the metric to reach; None: no target.
    """

    job: str
    title: str
    samples: str
    target: float | None

    @staticmethod
    def of(findings: Findings) -> Goal:
        """Returns the goal of these findings."""
        job = findings.job
        return Goal(job.name, job.title, job.samples, job.target)
