"""Where time comes from, so that tests can bring their own."""

from __future__ import annotations

import time
from typing import Protocol


class TimeSource(Protocol):
    """Monotonic seconds; only differences mean anything."""

    def now(self) -> float: ...


class SystemTime:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class FakeTime:
    """A clock that a test turns by hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backward: {seconds} s")
        self._now += seconds
