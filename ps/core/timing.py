"""Clocks that tests can replace, and the choice of the fastest of several measurements."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol


class TimeSource(Protocol):
    """Monotonic seconds. Only differences are meaningful."""

    def now(self) -> float: ...


class SystemTime:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


CLEAR = 0.05
"""A relative gain below this is noise."""


def fastest(seconds: Mapping[int, float]) -> int:
    """Returns the size with the lowest time, or the first size unless another is clearly faster."""
    default = next(iter(seconds))
    best = min(seconds, key=lambda size: seconds[size])
    return best if seconds[best] < (1 - CLEAR) * seconds[default] else default
