"""Waits for a poller: spins for a moment if the last wait was short, then sleeps.

A wake-up takes about 25 us, and the woken thread runs with cold caches: together nearly half the time of a
small push. If the last wait was short, the next one probably is too, so the thread spins before it sleeps.
If waits are long it does not spin, since that would keep a core from the processes that it waits for.

A thread sleeps as a batch task (SCHED_BATCH), so its wake-up does not preempt the thread that wakes it. A
worker notifies all its shards before the first of them sums, and a shard answers all its workers before the
first of them goes on. The cost: on a busy core the woken thread waits for the running thread's time slice to
end, and sleeping takes four more system calls, about 4 us.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

AWAKE_SECONDS = 500e-6
"""Seconds to spin. Longer than a push of 4 KB takes when both ends sleep (0.3 ms with shared memory, 0.5 ms
with ZeroMQ).

Otherwise one slow round would make both ends sleep in all later rounds. When both spin, the push takes 0.17
and 0.31 ms (medians of 2,500, two cores). A step of 100 MiB takes as long as without spinning, 24 and 137 ms.
"""

_NO_PRIORITY = os.sched_param(0)

Poll = Callable[[float | None], list[tuple[int, int]]]
"""A `select.epoll`'s poll: waits for the given seconds or without limit. Returns (descriptor, events)."""


class SpinWait:
    """Waits for one poller. For one thread.

    Args:
        poll: The poller's poll method.
        clock: Returns seconds.
    """

    def __init__(self, poll: Poll, clock: Callable[[], float] = time.perf_counter) -> None:
        self._poll = poll
        self._clock = clock
        self._was_short = False
        """Whether the last wait was short."""

    def wait(self, timeout: float | None = None) -> dict[int, int]:
        """Blocks until a descriptor is ready or about `timeout` seconds pass.

        Returns events by descriptor.
        """
        began = self._clock()
        ready = self._spin(began + AWAKE_SECONDS) if self._was_short else []
        ready = ready or self._sleep(timeout)
        self._was_short = self._clock() - began < AWAKE_SECONDS
        return dict(ready)

    def _sleep(self, timeout: float | None) -> list[tuple[int, int]]:
        is_ordinary = _policy() == os.SCHED_OTHER  # else the user chose another policy
        try:
            if is_ordinary:
                _set_policy(os.SCHED_BATCH)
            return self._poll(timeout)
        finally:
            if is_ordinary and _policy() == os.SCHED_BATCH:
                _set_policy(os.SCHED_OTHER)

    def _spin(self, end: float) -> list[tuple[int, int]]:
        while not (ready := self._poll(0)) and self._clock() < end:
            os.sched_yield()  # the peer may need this core
        return ready


def _policy() -> int | None:
    """This thread's scheduling policy; None if a sandbox hides it."""
    try:
        return os.sched_getscheduler(0)
    except OSError:
        return None


def _set_policy(policy: int) -> None:
    """Sets this thread's scheduling policy. Does nothing if a sandbox forbids it."""
    with suppress(OSError):
        os.sched_setscheduler(0, policy, _NO_PRIORITY)
