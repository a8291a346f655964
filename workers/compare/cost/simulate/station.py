"""A station: a link or a processor that serves one exchange after another."""

from __future__ import annotations

import numpy as np

from hubring.workers.compare.cost.simulate.draws import Array


class Station:
    """First come, first served (Lindley's recursion, 1952), for many arrivals at once.

    Args:
        each: Seconds of one exchange.
    """

    def __init__(self, each: float) -> None:
        self.busy = 0.0
        """Seconds of work."""
        self._each = each
        self._free = 0.0

    def take(self, arrivals: Array) -> Array:
        """Returns when each exchange is done.

        Args:
            arrivals: Ascending, and not before those of an earlier call.
        """
        done_before = np.arange(len(arrivals)) * self._each
        # The station works without a pause since the arrival that maximises this.
        began = np.maximum.accumulate(np.maximum(arrivals, self._free) - done_before)
        ends: Array = began + done_before + self._each
        if len(ends):
            self._free = float(ends[-1])
            self.busy += len(ends) * self._each
        return ends
