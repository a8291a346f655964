"""A worker's recent speed."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS = 3.0
"""Seconds over which the rate is measured: several heartbeats, but short."""


@dataclass(slots=True)
class StepRate:
    """Steps per second, from completed steps and the times of their reports; 0 before the first window."""

    rate: float = 0.0
    _since: float | None = None
    _from: int = 0

    def note(self, step: int, now: float) -> None:
        """Records the steps completed by `now`, in monotonic seconds. Fewer than before means another job."""
        # A resumed job jumps from 0 to its first step, which is no speed.
        if self._since is None or not self._from or step < self._from:
            self._since, self._from, self.rate = now, step, 0.0
        elif now - self._since >= WINDOW_SECONDS:
            self.rate = (step - self._from) / (now - self._since)
            self._since, self._from = now, step
