"""Lets calls wait for a change that another call makes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

PATIENCE = 3.0
"""Seconds after which a waiting call answers that it still waits."""


class Notifier:
    """Wakes waiting calls on this loop. Code that changes awaited state must call `announce`."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def wait_for(self, condition: Callable[[], bool], seconds: float = math.inf) -> None:
        """Returns once `condition()` is true, or after `seconds` (at most PATIENCE); the caller checks."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), min(seconds, PATIENCE))
            except TimeoutError:
                return

    async def wait_out(self, condition: Callable[[], bool], seconds: float = math.inf) -> None:
        """Returns once `condition()` is true, or after `seconds`, which may be more than PATIENCE."""
        now = asyncio.get_running_loop().time
        deadline = now() + seconds
        while not condition() and now() < deadline:
            await self.wait_for(condition, deadline - now())

    async def announce(self) -> None:
        """Makes all waiting calls check their conditions."""
        async with self._changed:
            self._changed.notify_all()
