"""Counters: how a server's jobs ended, and how workers left them."""

from __future__ import annotations

from collections import Counter

from hubring.ps.core.rejections import Rejections
from hubring.ps.job.outcome import Outcome

RESULTS = ("finished", "preempted", "failed")
"""How a job ends."""
WAYS = ("finished", "preempted", "failed", "lost")
"""How a worker leaves a job: the names in `Outcome.departures`."""


class JobCounters:
    """Counts since the server started. A job's own counts end with the job.

    Attributes:
        rejections: What the server refused.
        counted: The outcome of the last job that is over; its workers are in the counts.
    """

    def __init__(self) -> None:
        self.rejections = Rejections()
        self._jobs: Counter[str] = Counter()
        self._workers: Counter[str] = Counter()
        self.counted: Outcome | None = None

    def close(self, outcome: Outcome) -> None:
        """Counts a job that is over."""
        broken_off = "preempted" if outcome.was_preempted else "failed"
        self._jobs["finished" if outcome.ok else broken_off] += 1
        self.leave(outcome)

    def leave(self, outcome: Outcome) -> None:
        """Counts the workers of a job that never started."""
        self._workers.update(outcome.departures)
        self.counted = outcome

    def counts(self, latest: Outcome) -> dict[str, dict[str, int]]:
        """Returns jobs by result and workers by departure, including zeros, and rejections by reason.

        Args:
            latest: The outcome of the current or last job.
        """
        workers = self._workers.copy()
        if latest is not self.counted:
            workers.update(latest.departures)
        return {
            "jobs": {result: self._jobs[result] for result in RESULTS},
            "workers": {way: workers[way] for way in WAYS},
            "refused": self.rejections.counts(),
        }
