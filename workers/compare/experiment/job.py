"""What the comparison knows of what is trained: what it measures, and when that is good enough."""

from __future__ import annotations

from msgspec import Struct

from hubring.ps.core.errors import UsageError


class Job(Struct, frozen=True):
    """A job's yardstick.

    Attributes:
        name: As `ps-worker --job` takes it, or the name of a script.
        metric: Key of the measure in the job's record.
        title: The measure in words.
        target: Where the measure counts as reached unless the user says otherwise; None: nowhere.
        rising: More is better.
        samples: What the job calls its samples.
        learning_rate: What the job takes unless it is told; None: nobody knows.
    """

    name: str
    metric: str
    title: str
    target: float | None = None
    rising: bool = True
    samples: str = "samples"
    learning_rate: float | None = None

    def reached(self, value: float) -> bool:
        """Whether a value of the measure is as good as the target."""
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
    """The job of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in JOBS:
        raise UsageError(f"--job: there is no job {name!r}; there are {', '.join(JOBS)}")
    return JOBS[name]
