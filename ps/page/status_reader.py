"""Reads the hub's current status, and the last reports of its shards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

SHARD_SECONDS = 0.2
"""How long the page waits for the shards' reports. A stopped shard must not delay the rest."""


class Hub(Protocol):
    """The interface of a coordinator that the page uses."""

    def report(self, shards: list[dict[str, Any]]) -> dict[str, Any]: ...

    async def shards(self) -> list[dict[str, Any]]: ...

    async def save(self) -> tuple[Path, int]: ...

    async def drain(self) -> None: ...

    async def end(self, why: str) -> None: ...


class StatusReader:
    """Reads one hub. Concurrent readers share one request to the shards.

    Args:
        hub: The hub.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._asking: asyncio.Task[None] | None = None
        self._known: list[dict[str, Any]] = []

    async def read(self, patience: float = SHARD_SECONDS) -> dict[str, Any]:
        """Returns the report of `Coordinator.status`. Slow shards appear with their last report.

        Args:
            patience: Seconds to wait for the shards.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        asking = self._asking
        await asyncio.wait([asking], timeout=patience)
        if asking.done() and not asking.cancelled():  # cancelled: a shard was dismissed during the request
            asking.result()
        return self._hub.report(self._known)

    async def _ask(self) -> None:
        self._known = await self._hub.shards()

    def workers(self) -> dict[str, Any]:
        """Returns the report without shards, and sends no request to them."""
        return self._hub.report([])

    async def close(self) -> None:
        """Cancels the request to the shards."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
