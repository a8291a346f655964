"""The standbys that a host starts in the place of processes that ended.

Law: a host keeps as many shards and standbys as it began with. A standby starts at once, unless processes
end young one after another: the next one may end for the same reason, so each pause is twice as long as the
one before.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from hubring.ps.process.restarts import pause_after

log = logging.getLogger(__name__)

STEADY_SECONDS = 60.0
"""A process that ran this long is not young."""


class Replacements:
    """Starts the standbys of one host.

    Args:
        wanted: How many shards and standbys the host has.
        start: Starts a standby.
        now: Returns seconds.
    """

    def __init__(
        self, wanted: int, start: Callable[[], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._wanted, self._start, self._now = wanted, start, now
        self._young = 0
        """How many processes ended young, one after another."""
        self._due = -math.inf

    def note(self, what: str, age: float) -> None:
        """Notes that a process ended.

        Args:
            what: Which process ended and how, in words.
            age: How many seconds it ran.
        """
        self._young = 0 if age >= STEADY_SECONDS else self._young + 1
        pause = pause_after(self._young - 1) if self._young > 1 else 0.0
        self._due = self._now() + pause
        log.warning("%s; starting a standby%s", what, f" in {pause:g} s" if pause else "")

    def fill(self, running: int) -> None:
        """Starts what is missing, once the pause is over; `running` processes have not ended."""
        if self._now() >= self._due:
            for _ in range(running, self._wanted):
                self._start()
