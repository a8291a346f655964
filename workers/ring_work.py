"""The operations under way on a ring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ps.errors import HubringError, RingBroken
from ps.work import Work
from workers.ring_group import gist


class RingWork(Work):
    """One operation.

    On the CPU `then` runs in the group's thread, so that it hides behind backward
    as the operation does. On CUDA an operation is over once its stream has it
    queued: the waiter's stream is put behind it and `then` is queued there.
    """

    def __init__(self, what: str, then: Callable[[], object] | None = None) -> None:
        super().__init__(what)
        self.then = then
        self.handle: Any = None

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.wait()
            self.run_then()

    def run_then(self) -> None:
        """Runs `then`, once."""
        then, self.then = self.then, None
        if then is not None:
            then()


class Operations:
    """Those of one group. The law: the first failure is everybody's, now and later.

    It does not know the group. `ended` runs in the group's own threads, and a
    group whose last reference is dropped there joins itself and aborts the process.

    Attributes:
        lost: Ranks known to be gone; whoever learns of one adds it, and errors name it.
    """

    def __init__(self, rank: int) -> None:
        self.lost: set[int] = set()
        self._rank = rank
        self._lock = threading.Lock()
        self._pending: set[RingWork] = set()
        self._failure: HubringError | None = None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def begin(self, work: RingWork) -> bool:
        """Takes an operation in; False, and the work has failed, if the ring has."""
        with self._lock:
            if self._failure is None:
                self._pending.add(work)
                return True
        work.fail(self._failure)
        return False

    def ended(self, work: RingWork, future: torch.futures.Future[Any]) -> None:
        """Called when an operation is over, one way or the other."""
        try:
            future.value()
            if work.handle is None:
                work.run_then()
        except RuntimeError as cause:
            self.break_in(work, cause)
            return
        with self._lock:
            self._pending.discard(work)
        work.complete_part()

    def break_in(self, work: RingWork, cause: RuntimeError) -> None:
        """Fails all with what the backend said of one."""
        known = ", ".join(f"rank {rank}" for rank in sorted(self.lost)) or "which one is not known yet"
        self.fail(
            RingBroken(
                f"rank {self._rank}: {work.what} failed, a member of the ring is gone ({known}): "
                f"{gist(cause)}; start the job again"
            )
        )

    def fail(self, error: HubringError) -> None:
        """Fails every pending and every later operation, from any thread; the first error counts."""
        with self._lock:
            failure = self._failure = self._failure or error
            pending, self._pending = self._pending, set()
        for work in pending:
            work.fail(failure)
