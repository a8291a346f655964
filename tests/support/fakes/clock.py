from __future__ import annotations


class FakeTime:
    """A clock that a test advances."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backward: {seconds} s")
        self._now += seconds
