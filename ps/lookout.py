"""Waits for a poller: awake for a moment where that pays, asleep otherwise.

To be woken takes some 25 us, and what runs then runs from cold caches: together
nearly half of the time that a lone small push takes. Whoever was woken soon after
it began to wait will likely be so again, and therefore looks on for a while before
it sleeps. Where waits are long nobody does: it would keep a core from those it waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

AWAKE_SECONDS = 500e-6
"""Longer than a lone push of 4 KB takes when both ends sleep (0.3 ms over shared memory, 0.5 over ZeroMQ).

Else one slow round would put both ends to sleep for good. Awake they take 0.17 and 0.31 (medians of 2,500,
two cores); a step of 100 MiB takes as long as without, 24 and 137 ms.
"""

Poll = Callable[[float | None], list[tuple[int, int]]]
"""A `select.epoll`'s: waits for so many seconds, or without end; gives (descriptor, events)."""


class Lookout:
    """Looks through one poller; for one thread.

    Args:
        poll: The poller's.
        clock: Seconds.
    """

    def __init__(self, poll: Poll, clock: Callable[[], float] = time.perf_counter) -> None:
        self._poll = poll
        self._clock = clock
        self._soon = False
        """Whether the last wait was a short one."""

    def wait(self, timeout: float | None = None) -> dict[int, int]:
        """Blocks until something is ready, or about `timeout` seconds; events by what is ready."""
        began = self._clock()
        ready = self._look_on(began + AWAKE_SECONDS) if self._soon else []
        ready = ready or self._poll(timeout)
        self._soon = self._clock() - began < AWAKE_SECONDS
        return dict(ready)

    def _look_on(self, end: float) -> list[tuple[int, int]]:
        while not (ready := self._poll(0)) and self._clock() < end:
            os.sched_yield()  # whoever is to give us something may want this very core
        return ready
