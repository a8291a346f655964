"""Waits for a poller: awake for a moment where that pays, asleep otherwise.

To be woken takes some 25 us, and what runs then runs from cold caches: together
nearly half of the time that a lone small push takes. Whoever was woken soon after
it began to wait will likely be so again, and therefore looks on for a while before
it sleeps. Where waits are long nobody does: it would keep a core from those it waits for.

Who sleeps here does so as a batch process (SCHED_BATCH): whoever wakes it is not put off its core for that.
A worker has rung all its shards before the first of them sums, and a shard has answered all its workers
before the first of them goes on. The price: on a core that somebody computes on, it waits for that one's turn
to end. Going to sleep costs four system calls more, some 4 us.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

AWAKE_SECONDS = 500e-6
"""Longer than a lone push of 4 KB takes when both ends sleep (0.3 ms over shared memory, 0.5 over ZeroMQ).

Else one slow round would put both ends to sleep for good. Awake they take 0.17 and 0.31 (medians of 2,500,
two cores); a step of 100 MiB takes as long as without, 24 and 137 ms.
"""

_NO_PRIORITY = os.sched_param(0)

Poll = Callable[[float | None], list[tuple[int, int]]]
"""A `select.epoll`'s: waits for so many seconds, or without end; gives (descriptor, events)."""


class SpinWait:
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
        is_ordinary = _policy() == os.SCHED_OTHER  # else somebody has chosen what it is to be
        try:
            if is_ordinary:
                _become(os.SCHED_BATCH)
            return self._poll(timeout)
        finally:
            if is_ordinary and _policy() == os.SCHED_BATCH:
                _become(os.SCHED_OTHER)

    def _look_on(self, end: float) -> list[tuple[int, int]]:
        while not (ready := self._poll(0)) and self._clock() < end:
            os.sched_yield()  # whoever is to give us something may want this very core
        return ready


def _policy() -> int | None:
    """This thread's; None where a sandbox does not tell."""
    try:
        return os.sched_getscheduler(0)
    except OSError:
        return None


def _become(policy: int) -> None:
    """Sets this thread's policy; where a sandbox forbids it, that costs time and nothing else."""
    with suppress(OSError):
        os.sched_setscheduler(0, policy, _NO_PRIORITY)
