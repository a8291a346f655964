"""What went over the wires so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """One process's counters; payload bytes, headers left out."""

    bytes_sent: int = 0
    bytes_received: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """How many of this process's pushes were applied at each staleness."""

    def clear(self) -> None:
        """Counts from here on; only while nothing is on its way."""
        self.bytes_sent = self.bytes_received = 0
        self.staleness.clear()
