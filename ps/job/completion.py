"""Completion: how much of a job is done, and when it will end."""

from __future__ import annotations

from collections import deque

MOST_READINGS = 60
"""The speed is that of the last readings, so that it follows a job that becomes slower."""

APART_SECONDS = 1.0
"""Smallest distance of two readings."""


class Completion:
    """The part of a job that is done, from 0 to 1, and its recent speed.

    Law: only readings that differ from the one before count, so a job may report once per epoch. A reading
    below the one before starts over.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque(maxlen=MOST_READINGS)
        self._part: float | None = None

    @property
    def part(self) -> float | None:
        """The part that is done; None if it is not known."""
        return self._part

    def note(self, part: float | None, now: float) -> None:
        """Records the part that is done at `now`, in monotonic seconds."""
        if part is None or (self._part is not None and part < self._part):
            self._readings.clear()
        if part is not None and part != self._part and self._is_due(now):
            self._readings.append((now, part))
        self._part = part

    def seconds_left(self, now: float) -> float | None:
        """Returns the seconds until the end at the recent speed; None if the speed is not known."""
        if self._part is not None and self._part >= 1.0:
            return 0.0
        if len(self._readings) < 2:
            return None
        (began, first), (at, last) = self._readings[0], self._readings[-1]
        return max(0.0, (1.0 - last) * (at - began) / (last - first) - (now - at))

    def _is_due(self, now: float) -> bool:
        return not self._readings or now - self._readings[-1][0] >= APART_SECONDS
