"""What serving cost a shard, and whom it let wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Service:
    """One shard's time since its job began, in nanoseconds.

    Attributes:
        queued: Requests waited for others that came off the wire with them.
        handled: It read requests, updated and answered.
        held: By rank: answers were held back until the mode let them go.
    """

    queued: int = 0
    handled: int = 0
    held: Counter[int] = field(default_factory=Counter)

    def clear(self) -> None:
        """Counts from here on."""
        self.queued = self.handled = 0
        self.held.clear()
