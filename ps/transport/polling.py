"""Waits for a poller: spins for a moment if the last wait was short, then sleeps.

A wake-up takes about 25 us, and the woken thread runs with cold caches: together nearly half the time of a
small push. If the last wait was short, the next one probably is too, so the thread spins before it sleeps.
If waits are long it does not spin, since that would keep a core from the processes that it waits for.

A thread sleeps as a batch task (SCHED_BATCH), so its wake-up does not preempt the thread that wakes it. A
worker notifies all its shards before the first of them sums, and a shard answers all its workers before the
first of them goes on. The cost: on a busy core the woken thread waits for the running thread's time slice to
end, and sleeping takes four more system calls, about 4 us. A shard process is a batch task all the time.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress


class Bell:
    """Readable from the first `ring` until `clear`. `ring` is safe from any thread, even after `close`."""

    def __init__(self) -> None:
        self.waitable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.waitable)
        self._close.atexit = False  # daemon threads ring until the process is gone
        self._lock = threading.Lock()
        self._ringing = False

    def ring(self) -> None:
        """Makes the bell readable. A second ring before `clear` has no effect."""
        with self._lock:
            if not self._ringing:
                self._ringing = True
                os.eventfd_write(self.waitable, 1)

    def clear(self) -> None:
        """Silences the bell. Check for new work after this call, not before, to avoid missing a ring."""
        with self._lock:
            if self._ringing and self._close.alive:
                self._ringing = False
                os.eventfd_read(self.waitable)

    def close(self) -> None:
        """Closes the descriptor. Can be called twice."""
        with self._lock:
            self._ringing = True  # later rings do nothing
            self._close()


def poller(*descriptors: int) -> select.epoll:
    """Returns an epoll of these descriptors. The caller closes it and can register more."""
    epoll = select.epoll()
    for descriptor in descriptors:
        epoll.register(descriptor, select.EPOLLIN)
    return epoll


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
        is_ordinary = False
        try:
            with suppress(OSError):  # a sandbox may forbid both
                is_ordinary = os.sched_getscheduler(0) == os.SCHED_OTHER  # else the user chose another policy
                if is_ordinary:
                    os.sched_setscheduler(0, os.SCHED_BATCH, _NO_PRIORITY)
            return self._poll(timeout)
        finally:
            with suppress(OSError):
                if is_ordinary and os.sched_getscheduler(0) == os.SCHED_BATCH:
                    os.sched_setscheduler(0, os.SCHED_OTHER, _NO_PRIORITY)

    def _spin(self, end: float) -> list[tuple[int, int]]:
        while not (ready := self._poll(0)) and self._clock() < end:
            os.sched_yield()  # the peer may need this core
        return ready


def sleep_as_batch() -> None:
    """Makes this thread a batch task for good, for a thread that serves others and runs no one's script."""
    with suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, _NO_PRIORITY)
