"""The goal of an experiment: what was measured of the model, and when that was good enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.compare.job import JOBS


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
    def of(experiment: Mapping[str, Any]) -> Goal:
        """The goal that an experiment names; what it leaves out is the job's own."""
        known = JOBS.get(experiment.get("job") or "")
        metric = experiment.get("metric") or "final metric"
        target = experiment.get("target")
        return Goal(
            job=known.name if known else Path(experiment.get("script") or "a job").name,
            title=known.title if known else experiment.get("title") or metric.replace("_", " "),
            samples=known.samples if known else experiment.get("samples") or "samples",
            target=known.target if known and target is None else target,
        )
