"""Where time comes from, so that tests can bring their own; and which of some times is the least."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol


class TimeSource(Protocol):
    """Monotonic seconds; only differences mean anything."""

    def now(self) -> float: ...


class SystemTime:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


CLEAR = 0.05
"""A gain of less than this part is within the noise."""


def fastest(seconds: Mapping[int, float]) -> int:
    """The size that took the least time; the first size, unless another is clearly faster."""
    default = next(iter(seconds))
    best = min(seconds, key=lambda size: seconds[size])
    return best if seconds[best] < (1 - CLEAR) * seconds[default] else default
