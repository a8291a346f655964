"""Counters of jobs: how a server's jobs ended so far, and how workers left them."""

from __future__ import annotations

from collections import Counter

from hubring.ps.job.job import Outcome

RESULTS = ("finished", "preempted", "failed")
"""How a job ends."""
WAYS = ("finished", "preempted", "failed", "lost")
"""How a worker leaves one: the names of an outcome's departures."""


class JobCounters:
    """Counts since the server was started: what a job itself counts is gone once the next one begins."""

    def __init__(self) -> None:
        self._jobs: Counter[str] = Counter()
        self._workers: Counter[str] = Counter()
        self._counted: Outcome | None = None

    def close(self, outcome: Outcome) -> None:
        """A job is over."""
        broken_off = "preempted" if outcome.was_preempted else "failed"
        self._jobs["finished" if outcome.ok else broken_off] += 1
        self.leave(outcome)

    def leave(self, outcome: Outcome) -> None:
        """All workers left before it was a job."""
        self._workers.update(outcome.departures)
        self._counted = outcome

    def counts(self, latest: Outcome) -> dict[str, dict[str, int]]:
        """Jobs by result and workers by way, zeros too; `latest` is of the job that runs, or ran last."""
        workers = self._workers.copy()
        if latest is not self._counted:
            workers.update(latest.departures)
        return {
            "jobs": {result: self._jobs[result] for result in RESULTS},
            "workers": {way: workers[way] for way in WAYS},
        }
