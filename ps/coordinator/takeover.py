"""How a coordinator continues after it took over from a process that was killed.

Law: leases begin anew. A worker or a shard that has no connection RECONNECT_SECONDS later counts as one whose
connection closed: it may have ended while there was no coordinator. What the killed process may have sent in
part is sent again: views, a failure, the request to drain, a save.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from hubring.ps.core.timing import TimeSource

if TYPE_CHECKING:
    from hubring.ps.coordinator.coordinator import Coordinator

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 4.0
"""As long as a client goes on without an answer of its server."""


class Takeover:
    """Continues a coordinator's work.

    Args:
        coordinator: The coordinator.
        clock: The source of the time.

    Attributes:
        failovers: How often a standby took over since the server started.
    """

    def __init__(self, coordinator: Coordinator, clock: TimeSource) -> None:
        self.failovers = 0
        self._coordinator, self._clock = coordinator, clock
        self._begun = False
        self._reconnected_by = math.inf

    def begin(self, *, saving: bool) -> None:
        """Continues, once the coordinator has the state of the process that was killed.

        Args:
            saving: Whether that process was writing a checkpoint.
        """
        hub = self._coordinator
        self.failovers += 1
        self._begun = True
        self._reconnected_by = self._clock.now() + RECONNECT_SECONDS
        line = f"the coordinator was lost; its standby has taken over ({self.failovers} in all)"
        log.warning("%s", line)
        hub.job.tell(line)
        hub.standbys.take_over()
        if saving:
            hub.checkpoints.hasten()

    @property
    def recent(self) -> bool:
        """Whether some workers may not have reported their steps yet."""
        return self._reconnected_by < math.inf

    async def check(self, now: float) -> None:
        """Repeats the request to drain; notices who has not connected again in time."""
        hub = self._coordinator
        if self._begun and (hub.stopping or hub.job.draining):
            await (hub.drain() if hub.stopping else hub.shutdown.drain())
        self._begun = False
        if now > self._reconnected_by:
            self._reconnected_by = math.inf
            hub.connections.expect()
