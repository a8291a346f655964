"""How fast a worker goes lately."""

from __future__ import annotations

from dataclasses import dataclass

LATELY = 3.0
"""Seconds over which a pace is taken: several heartbeats, yet soon over."""


@dataclass(slots=True)
class StepRate:
    """Steps a second, from completed steps and when they were told; 0 until there is something to tell."""

    rate: float = 0.0
    _since: float | None = None
    _from: int = 0

    def note(self, step: int, now: float) -> None:
        """Takes down the steps completed by `now`, in monotonic seconds; fewer than before: another job."""
        # From 0 on a job that resumes would leap.
        if self._since is None or not self._from or step < self._from:
            self._since, self._from, self.rate = now, step, 0.0
        elif now - self._since >= LATELY:
            self.rate = (step - self._from) / (now - self._since)
            self._since, self._from = now, step
