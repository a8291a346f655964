"""Reader: the hub as it is now, and its shards as they last told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

SHARD_SECONDS = 0.2
"""How long shards may take to tell of themselves; a stopped one must not hide the rest."""


class Hub(Protocol):
    """What the page needs of a coordinator."""

    def report(self, shards: list[dict[str, Any]]) -> dict[str, Any]: ...

    async def shards(self) -> list[dict[str, Any]]: ...

    async def save(self) -> tuple[Path, int]: ...

    async def drain(self) -> None: ...

    async def end(self, why: str) -> None: ...


class Reader:
    """Reads one hub; who reads while the shards are being asked waits for the same answer.

    Args:
        hub: The one.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._asking: asyncio.Task[list[dict[str, Any]]] | None = None
        self._known: list[dict[str, Any]] = []

    async def read(self) -> dict[str, Any]:
        """A report as of `Coordinator.status`; where shards are slow to tell, what they told before."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._hub.shards())
        asking = self._asking
        await asyncio.wait([asking], timeout=SHARD_SECONDS)
        if asking.done():
            self._known = merged(self._known, asking.result())
            if self._asking is asking:
                self._asking = None
        return self._hub.report(self._known)

    def workers(self) -> dict[str, Any]:
        """The same without asking the shards."""
        return self._hub.report([])

    async def close(self) -> None:
        """Asks no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])


def merged(known: Sequence[dict[str, Any]], told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was told, after what is known where it tells only why nobody answers."""
    if any("shard" in row for row in told) or not any("error" in row for row in told):
        return told
    return [*(row for row in known if "shard" in row), *told]
