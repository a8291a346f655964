"""Rates: how fast counters rise, as far as somebody has been watching them."""

from __future__ import annotations

from hubring.ps.job.step_rate import StepRate

FORGOTTEN = 10.0
"""Seconds after which what was read before tells nothing of how it goes now."""


class Rates:
    """Counters by name, read at the same times."""

    def __init__(self) -> None:
        self._rates: dict[str, StepRate] = {}
        self._now = 0.0

    def at(self, now: float) -> None:
        """The readings that follow are of this time, in monotonic seconds."""
        if now - self._now > FORGOTTEN:
            self._rates.clear()
        self._now = now

    def of(self, name: str, count: int) -> float:
        """A second; 0 until there is something to tell."""
        rate = self._rates.get(name)
        if rate is None:
            rate = self._rates[name] = StepRate()
        rate.note(count, self._now)
        return rate.rate
