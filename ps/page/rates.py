"""Rates: how fast counters rise, as far as somebody has been watching them."""

from __future__ import annotations

from hubring.ps.job.step_rate import Pace

FORGOTTEN = 10.0
"""Seconds after which what was read before tells nothing of how it goes now."""


class Rates:
    """Counters by name, read at the same times."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        self._now = 0.0

    def at(self, now: float) -> None:
        """The readings that follow are of this time, in monotonic seconds."""
        if now - self._now > FORGOTTEN:
            self._paces.clear()
        self._now = now

    def of(self, name: str, count: int) -> float:
        """A second; 0 until there is something to tell."""
        pace = self._paces.get(name)
        if pace is None:
            pace = self._paces[name] = Pace()
        pace.note(count, self._now)
        return pace.rate
