"""The hub as it is now, and its shards as they last told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

SHARD_SECONDS = 0.2
"""How long shards may take to tell of themselves on a page; a stopped one must not hide the rest."""


class Hub(Protocol):
    """What the page needs of a coordinator."""

    def report(self, shards: list[dict[str, Any]]) -> dict[str, Any]: ...

    async def shards(self) -> list[dict[str, Any]]: ...

    async def save(self) -> tuple[Path, int]: ...

    async def drain(self) -> None: ...

    async def end(self, why: str) -> None: ...


class StatusReader:
    """Reads one hub; who reads while the shards are being asked waits for the same answer.

    Args:
        hub: The one.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._asking: asyncio.Task[None] | None = None
        self._known: list[dict[str, Any]] = []

    async def read(self, patience: float = SHARD_SECONDS) -> dict[str, Any]:
        """A report as of `Coordinator.status`; where shards are slow to tell, what they told before.

        Args:
            patience: Seconds that they may take.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        asking = self._asking
        await asyncio.wait([asking], timeout=patience)
        if asking.done() and not asking.cancelled():  # cancelled: a shard was dismissed while it was asked
            asking.result()
        return self._hub.report(self._known)

    async def _ask(self) -> None:
        self._known = await self._hub.shards()

    def workers(self) -> dict[str, Any]:
        """The same without asking the shards."""
        return self._hub.report([])

    async def close(self) -> None:
        """Asks no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
