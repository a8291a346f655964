"""Rates: how fast counters rise while the page is watched."""

from __future__ import annotations

from hubring.ps.job.step_rate import StepRate

FORGOTTEN = 10.0
"""Seconds between two readings after which all rates restart."""


class Rates:
    """The rates of counters that are read together, by name."""

    def __init__(self) -> None:
        self._rates: dict[str, StepRate] = {}
        self._now = 0.0

    def at(self, now: float) -> None:
        """Sets the time of the next readings, in monotonic seconds."""
        if now - self._now > FORGOTTEN:
            self._rates.clear()
        self._now = now

    def of(self, name: str, count: int) -> float:
        """Notes a reading and returns the rate per second; 0 if it is not known yet."""
        rate = self._rates.get(name)
        if rate is None:
            rate = self._rates[name] = StepRate()
        rate.note(count, self._now)
        return rate.rate
