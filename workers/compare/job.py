"""What the comparison knows of the jobs that ship: what they measure, and when that is good enough."""

from __future__ import annotations

from dataclasses import dataclass

from ps.errors import UsageError


@dataclass(frozen=True, slots=True)
class Job:
    """A job's yardstick.

    Attributes:
        name: As `ps-worker --job` takes it.
        metric: Key of the measure in the job's record.
        title: The measure in words.
        target: Where the measure counts as reached unless the user says otherwise.
        rising: More is better.
        samples: What the job calls its samples.
    """

    name: str
    metric: str
    title: str
    target: float
    rising: bool
    samples: str

    def reached(self, value: float, target: float) -> bool:
        """Whether a value of the measure is as good as the target."""
        return value >= target if self.rising else value <= target


JOBS = {
    job.name: job
    for job in (
        Job("digits", "test_accuracy", "test accuracy", 0.93, rising=True, samples="images"),
        Job("char-lm", "bits_per_char", "bits per character", 2.5, rising=False, samples="lines"),
    )
}


def find(name: str) -> Job:
    """The job of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in JOBS:
        raise UsageError(f"--job: there is no job {name!r}; there are {', '.join(JOBS)}")
    return JOBS[name]
