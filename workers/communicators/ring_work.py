"""The operations under way on a ring, and the thread that follows them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring_group import gist


class RingWork(Work):
    """One operation.

    On the CPU `then` runs in the following thread, so that it hides behind
    backward as the operation does. On CUDA an operation is over once its stream
    has it queued: the waiter's stream is put behind it and `then` is queued there.
    """

    def __init__(self, what: str, then: Callable[[], object] | None = None) -> None:
        super().__init__(what)
        self._then = then
        self._handle: Any = None

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        if self._handle is not None:
            try:
                self.settle(self._handle)
            except RuntimeError as cause:
                raise RingBroken(f"{self.what} failed: {gist(cause)}; start the job again") from cause

    def queued(self, handle: Any) -> None:
        """The operation is in a stream's queue, behind which whoever waits must put itself."""
        self._handle = handle
        self.complete_part()

    def settle(self, handle: Any) -> None:
        """Waits for torch's handle of the operation, then does what is left to do, once."""
        self._handle = None
        handle.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


class Operations:
    """Those of one group. The law: the first failure is everybody's, now and later.

    A thread waits for them in the order in which they began. Callbacks of torch's
    futures would spare it, but they run in the group's own threads: one that still
    runs when the interpreter ends aborts the process, and one that drops the last
    reference to its group makes the group wait for itself.

    Attributes:
        lost: Ranks known to be gone; whoever learns of one adds it, and errors name it.
    """

    def __init__(self, rank: int) -> None:
        self.lost: set[int] = set()
        self._rank = rank
        self._lock = threading.Lock()
        self._pending: set[RingWork] = set()
        self._failure: HubringError | None = None
        self._begun: SimpleQueue[tuple[RingWork, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow_all, name="ring", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether nothing on this ring will ever succeed again."""
        return self._failure is not None

    def begin(self, work: RingWork) -> bool:
        """Takes an operation in; False, and the work has failed, if the ring has."""
        with self._lock:
            if self._failure is None:
                self._pending.add(work)
                return True
        work.fail(self._failure)
        return False

    def follow(self, work: RingWork, handle: Any) -> None:
        """Completes `work`, or fails all, when torch's handle of it says so."""
        self._begun.put((work, handle))

    def queued(self, work: RingWork, handle: Any) -> None:
        """Completes `work` as far as the host is concerned: a stream has it."""
        with self._lock:
            self._pending.discard(work)
        work.queued(handle)

    def end(self, work: RingWork) -> None:
        """Completes an operation."""
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

    def close(self) -> None:
        """Ends the thread, once it has followed what began; not after a failure, where that may never end."""
        self._begun.put(None)
        if not self.failed:
            self._thread.join()

    def _follow_all(self) -> None:
        while (begun := self._begun.get()) is not None:
            work, handle = begun
            try:
                work.settle(handle)
            except RuntimeError as cause:
                self.break_in(work, cause)
                continue
            except Exception as error:  # a codec's, say: whatever it is, all later operations wait here
                told = f"rank {self._rank}: {work.what} failed: {error!r}; start the job again"
                self.fail(error if isinstance(error, HubringError) else RingBroken(told))
                continue
            self.end(work)
