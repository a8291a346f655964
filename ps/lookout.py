"""Waits for a poller: awake for a moment where that pays, asleep otherwise.

To be woken takes some 25 us, and what runs then runs from cold caches: together
nearly half of the time that a lone small push takes. Whoever was woken soon after
it began to wait will likely be so again, and therefore looks on for a while before
it sleeps. Where waits are long nobody does: it would keep a core from those it waits for.

Who sleeps does so as a batch process (SCHED_BATCH): whoever wakes it is not put off its core for that. A
worker has rung all its shards before the first of them sums, and a shard has answered all its workers
before the first of them goes on.
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

_NO_PRIORITY = os.sched_param(0)

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
        ready = ready or self._sleep(timeout)
        self._soon = self._clock() - began < AWAKE_SECONDS
        return dict(ready)

    def _sleep(self, timeout: float | None) -> list[tuple[int, int]]:
        is_batch = _turn_batch()
        try:
            return self._poll(timeout)
        finally:
            if is_batch:
                os.sched_setscheduler(0, os.SCHED_OTHER, _NO_PRIORITY)

    def _look_on(self, end: float) -> list[tuple[int, int]]:
        while not (ready := self._poll(0)) and self._clock() < end:
            os.sched_yield()  # whoever is to give us something may want this very core
        return ready


def _turn_batch() -> bool:
    """Whether this thread, an ordinary one so far, is a batch one from now on."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False  # somebody has chosen what it is to be
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, _NO_PRIORITY)
    except OSError:  # a sandbox that forbids it: it costs time, nothing else
        return False
    return True
