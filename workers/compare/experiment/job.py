"""Jobs as the comparison sees them: the metric and its target."""

from __future__ import annotations

from msgspec import Struct

from hubring.ps.core.errors import UsageError


class Job(Struct, frozen=True):
    """A job's metric and target.

    Attributes:
        name: Name for `ps-worker --job`, or the name of a script.
        metric: Key of the metric in the job's record.
        title: The metric in words.
        target: Default target of the metric; None: no target.
        rising: Higher values are better.
        samples: Word for the job's samples.
        learning_rate: Default of the job; None: unknown.
    """

    name: str
    metric: str
    title: str
    target: float | None = None
    rising: bool = True
    samples: str = "samples"
    learning_rate: float | None = None

    def reached(self, value: float) -> bool:
        """Whether a value of the metric meets the target."""
        if self.target is None:
            return False
        return value >= self.target if self.rising else value <= self.target


JOBS = {
    job.name: job
    for job in (
        Job("digits", "test_accuracy", "test accuracy", 0.93, True, "images", learning_rate=0.01),
        Job("char-lm", "bits_per_char", "bits per character", 2.5, False, "lines", learning_rate=0.003),
    )
}


def find(name: str) -> Job:
    """Returns the job with that name.

    Raises:
        UsageError: No job has that name.
    """
    if name not in JOBS:
        raise UsageError(f"--job: no job {name!r}; expected one of {', '.join(JOBS)}")
    return JOBS[name]
