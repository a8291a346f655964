"""How a job ended, for the workers that left it or that lost their place in it.

Law: a job has one verdict. It is known once the job is over and its last checkpoint is
written, or could not be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from hubring.ps.core.types import Sender
from hubring.ps.job.membership import Departure

KEPT_JOBS = 8
"""A worker asks at once how its job ended, so a few jobs are enough."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one job ended.

    Attributes:
        job: The job's name.
        summary: How its workers left, in words.
        error: Why the job failed, or has no last checkpoint; empty if neither.
        exit_code: The exit code of `error`.
    """

    job: str
    summary: str
    error: str = ""
    exit_code: int = 0

    def __str__(self) -> str:
        how = f"failed: {self.error}" if self.error else f"finished ({self.summary})"
        return f"job {self.job!r} is over: it {how}"


class EndedJobs:
    """The verdicts of the last jobs."""

    def __init__(self) -> None:
        self._ended: deque[tuple[Mapping[int, Departure], Verdict]] = deque(maxlen=KEPT_JOBS)

    def add(self, departed: Mapping[int, Departure], verdict: Verdict) -> None:
        """Adds the verdict of a job with these former workers, by incarnation."""
        self._ended.append((departed, verdict))

    def find(self, sender: Sender) -> Verdict | None:
        """Returns how the job ended that this worker left; None if it runs, or the worker did not leave."""
        for departed, verdict in self._ended:
            gone = departed.get(sender.incarnation)
            if gone is not None and gone.left:
                return verdict
        return None

    def absence(self, sender: Sender) -> str:
        """Returns what happened to a worker of an ended job, and how the job ended, in words; or empty."""
        for departed, verdict in self._ended:
            if sender.incarnation in departed:
                gone = departed[sender.incarnation]
                return f"{verdict}. {gone.member} was no member at the end: {gone.why}"
        return ""
