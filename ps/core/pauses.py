"""Notices when this process did not run: it was stopped, or its machine slept or was overloaded.

Law: a wait that ends much later than its limit contains a pause. While a process is paused it hears from no
other process, so it must not take its own silence for theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hubring.ps.core.timing import SystemTime, TimeSource

LATE_SECONDS = 0.5
"""A wait may end this much later than its limit on a busy machine."""


class Pauses:
    """Adds up the pauses of this process.

    Args:
        clock: The source of the time.

    Attributes:
        seconds: Length of the pauses since the last `clear`, including the waits in which they fell.
    """

    def __init__(self, clock: TimeSource | None = None) -> None:
        self.seconds = 0.0
        self._clock = clock or SystemTime()

    @contextmanager
    def within(self, limit: float) -> Iterator[None]:
        """Encloses a wait that ends after `limit` seconds at the latest."""
        began = self._clock.now()
        try:
            yield
        finally:
            took = self._clock.now() - began
            if took > limit + LATE_SECONDS:
                self.seconds += took

    def clear(self) -> None:
        """Forgets the pauses, because they had no consequences."""
        self.seconds = 0.0
