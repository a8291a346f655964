"""A key-value store in which the workers of a job exchange addresses and the like."""

from __future__ import annotations

from hubring.ps.coordinator.notifier import Notifier


class Rendezvous:
    """Values by key, of one job.

    Args:
        notifier: Where workers wait for a value.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._values: dict[str, str] = {}

    async def pin(self, key: str, value: str) -> None:
        """Stores a value and wakes the workers that wait for it."""
        self._values[key] = value
        await self._notifier.announce()

    async def find(self, key: str, seconds: float) -> str:
        """Waits for a value and returns it; empty after `seconds` without one."""
        await self._notifier.wait_for(lambda: key in self._values, seconds)
        return self._values.get(key, "")
