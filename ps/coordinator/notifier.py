"""Where calls wait that depend on what others do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

PATIENCE = 3.0
"""Seconds after which a call that waits for others answers with a sentence instead."""


class Notifier:
    """Whoever changes what somebody on this loop may wait for announces it."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def wait_for(self, condition: Callable[[], bool], seconds: float = math.inf) -> None:
        """Returns once `condition()`, or after `seconds`, PATIENCE at most: who needs to know looks again."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), min(seconds, PATIENCE))
            except TimeoutError:
                return

    async def announce(self) -> None:
        """Makes all who wait look again."""
        async with self._changed:
            self._changed.notify_all()
