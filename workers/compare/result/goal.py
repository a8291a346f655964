"""The goal of an experiment: what was measured of the model, and when that was good enough."""

from __future__ import annotations

from dataclasses import dataclass

from hubring.workers.compare.result.findings import Findings


@dataclass(frozen=True, slots=True)
class Goal:
    """What the experiment was after.

    Attributes:
        job: What was trained.
        title: The measure in words.
        samples: What a sample is called.
        target: Value of the measure to reach; None: there was none.
    """

    job: str
    title: str
    samples: str
    target: float | None

    @staticmethod
    def of(findings: Findings) -> Goal:
        """The goal that findings name."""
        job = findings.job
        return Goal(job.name, job.title, job.samples, job.target)
