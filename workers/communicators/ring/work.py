"""Pending operations of a ring, and the thread that waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from hubring.ps.core.errors import DeadlineExceeded, HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring.group import gist


class RingWork(Work):
    """One operation.

    On the CPU `then` runs in the thread that waits for operations, so it overlaps with backward
    as the operation does. On CUDA the work is done once its stream has queued the operation.
    `wait` then makes the caller's stream wait for it and queues `then` there. In a ring that
    heals, a GPU's operations are done as on the CPU.
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
                raise RingBroken(f"{self.what} failed: {gist(cause)}; restart the job") from cause

    def queued(self, handle: Any) -> None:
        """Completes the work of an operation that is queued on a stream. `wait` must settle its handle."""
        self._handle = handle
        self.complete_part()

    def settle(self, handle: Any) -> None:
        """Waits for torch's handle of the operation, then calls `finish`."""
        self._handle = None
        handle.wait()
        self.finish()

    def finish(self) -> bool:
        """Runs `then` once; returns whether there was one."""
        then, self._then = self._then, None
        if then is not None:
            then()
        return then is not None


WaitForHost = Callable[[RingWork, Any], None]
"""Waits until an operation has ended, with torch's handle, and settles its work."""


class Operations:
    """The operations of one group. The first failure fails all current and later operations.

    A thread waits for operations in the order in which they started. Callbacks of torch's futures
    would need no thread, but they run in the group's own threads. A callback that still runs when
    the interpreter exits aborts the process; a callback that drops the last reference to its group
    makes the group wait for itself.

    Args:
        rank: This process's rank.
        wait: See `WaitForHost`.
    """

    def __init__(self, rank: int, wait: WaitForHost = RingWork.settle) -> None:
        self._rank = rank
        self._wait = wait
        self._lock = threading.Lock()
        self._pending: set[RingWork] = set()
        self._failure: HubringError | None = None
        self._begun: SimpleQueue[tuple[RingWork, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow_all, name="ring", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the ring has failed."""
        return self._failure is not None

    @property
    def pending(self) -> bool:
        """Whether an operation has begun and not ended."""
        return bool(self._pending)

    def begin(self, work: RingWork) -> bool:
        """Adds an operation. If the ring has failed, fails the work and returns False."""
        with self._lock:
            if self._failure is None:
                self._pending.add(work)
                return True
        work.fail(self._failure)
        return False

    def follow(self, work: RingWork, handle: Any) -> None:
        """Completes `work`, or fails all operations, when torch's handle is done."""
        self._begun.put((work, handle))

    def queued(self, work: RingWork, handle: Any) -> None:
        """Completes `work` for the host: its operation is queued on a stream."""
        with self._lock:
            self._pending.discard(work)
        work.queued(handle)

    def end(self, work: RingWork) -> None:
        """Completes an operation."""
        with self._lock:
            self._pending.discard(work)
        work.complete_part()

    def break_in(self, work: RingWork, cause: Exception) -> None:
        """Fails all operations with the backend's error for one of them."""
        if "Timed out" in str(cause):  # Gloo has no other mark for its timeout
            text = f"rank {self._rank}: {work.what} failed: {gist(cause)}"
            self.fail(DeadlineExceeded(f"{text}; raise --timeout if a worker may take this long"))
            return
        self.fail(
            RingBroken(
                f"rank {self._rank}: {work.what} failed because a member of the ring is lost:"
                f" {gist(cause)}; restart the job, with uneven=True in DistributedOptimizer if ranks have"
                " different numbers of batches"
            )
        )

    def fail(self, error: HubringError) -> None:
        """Fails all pending and later operations with the first error. Safe to call from any thread."""
        with self._lock:
            failure = self._failure = self._failure or error
            pending, self._pending = self._pending, set()
        for work in pending:
            work.fail(failure)

    def end_thread(self, seconds: float) -> bool:
        """Waits until torch has ended all operations, after `fail`; returns whether it has in this time."""
        self._begun.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread after the pending operations. After a failure it does not wait for the thread."""
        self._begun.put(None)
        if not self.failed:
            self._thread.join()

    def _follow_all(self) -> None:
        torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
        while (begun := self._begun.get()) is not None:
            work, handle = begun
            try:
                self._wait(work, handle)
            except (RuntimeError, RingBroken, DeadlineExceeded) as cause:
                self.break_in(work, cause)
                continue
            except Exception as error:  # any error (a codec's, for example): later operations wait here
                text = f"rank {self._rank}: {work.what} failed: {error!r}; restart the job"
                self.fail(error if isinstance(error, HubringError) else RingBroken(text))
                continue
            self.end(work)


POLL_SECONDS = 2e-4


class ConfirmedWait:
    """Waits until an operation has ended on all members.

    A GPU's operation is waited for on a stream of its own: what the script queues must not wait behind an
    operation that never ends. Only an event reports its end. torch's handle would abort NCCL in this thread
    after an error, while others start operations, and asking it can wait for an abort with Python locked.

    Args:
        device: Where the operations run.
        confirm: Waits until all members have called it as often.
        timeout: Seconds that an operation of a GPU may take.
    """

    def __init__(self, device: torch.device, confirm: Callable[[], None], timeout: float) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._confirm = confirm
        self._timeout = timeout
        self._failed = False

    def __call__(self, work: RingWork, handle: Any) -> None:
        if self._failed:  # a confirmation now would count for that operation
            raise RingBroken("an operation before this one has failed")
        try:
            self._await(work, handle)
            self._confirm()
        except BaseException:
            self._failed = True
            raise

    def _await(self, work: RingWork, handle: Any) -> None:
        if self._stream is None:
            work.settle(handle)
            return
        torch.cuda.set_device(self._stream.device)  # or this thread would begin to use the first GPU
        with torch.cuda.stream(self._stream):
            limit = time.monotonic() + self._timeout
            handle.block_current_stream()
            self._pass(self._stream, work, limit)
            if work.finish():
                self._pass(self._stream, work, limit)

    def _pass(self, stream: torch.cuda.Stream, work: RingWork, limit: float) -> None:
        """Waits until the stream has done all that it has."""
        done = stream.record_event(torch.cuda.Event())  # type: ignore[no-untyped-call]
        while not done.query():
            if time.monotonic() > limit:
                raise RingBroken(f"{work.what} took longer than {self._timeout:g} s")
            time.sleep(POLL_SECONDS)
