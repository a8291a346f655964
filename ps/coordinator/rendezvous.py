"""Where workers leave what the others of their job need to find them."""

from __future__ import annotations

from hubring.ps.coordinator.notifier import Notifier


class Rendezvous:
    """Values by key, of one job.

    Args:
        notifier: Where those wait who look for a value.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._values: dict[str, str] = {}

    async def pin(self, key: str, value: str) -> None:
        """Puts a value up for all who look for it."""
        self._values[key] = value
        await self._notifier.announce()

    async def find(self, key: str, seconds: float) -> str:
        """The value, waited for; empty if none came."""
        await self._notifier.wait_for(lambda: key in self._values, seconds)
        return self._values.get(key, "")
