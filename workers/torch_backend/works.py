"""What an operation of a group returns, and the thread that runs a group's operations in order.

Law: the operations of a lane run one at a time, in the order of `start`. A caller that waits anyway runs its
operation itself if none is before it, because waking another thread takes longer than a small exchange.
A callback of a future runs in the lane's thread. If it starts an operation, for which it may wait, another
thread takes over the lane.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import DistBackendError
from torch.distributed.distributed_c10d import Work
from torch.futures import Future


class Tensors(list[torch.Tensor]):
    """The value of a work's future.

    Attributes:
        source: The rank that a received tensor is from.
    """

    source = -1


class GroupWork(Work):
    """An operation in flight. Its future has the list of the caller's tensors.

    Args:
        what: The operation's name, for errors.
        tensors: The tensors that have the result.
        timeout: Seconds that `wait` waits by default.
    """

    def __init__(self, what: str, tensors: Sequence[torch.Tensor], timeout: float) -> None:
        super().__init__()
        self._what = what
        self._tensors = Tensors(tensors)
        self._timeout = timeout
        self._done = threading.Event()
        self._error: BaseException | None = None
        devices = sorted({one.device.index for one in tensors if one.device.type == "cuda"})
        self._ended: Future[list[torch.Tensor]] = Future(
            devices=[torch.device("cuda", one) for one in devices]
        )
        # An error from `Future.set_exception` is a value to C++, which takes tensors from it: DDP crashes.
        self._future = self._ended.then(self._outcome)

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Ends the operation.

        Args:
            error: Why it failed; None if it did not.
            source: The rank that a received tensor is from.
        """
        self._tensors.source = source
        if error is not None:
            self._error = DistBackendError(f"{self._what}: {error}")
            self._error.__cause__ = error
        self._ended.set_result(self._tensors)
        self._done.set()

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds() or self._timeout
        if not self._done.wait(seconds):
            raise DistBackendError(
                f"Timed out waiting {seconds:g} s for {self._what}. Not all ranks called it in time; see"
                " timeout=... of init_process_group"
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._tensors.source

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self._future


def see_through_holders() -> None:
    """Makes torch's `Work` answer for the works of backends in Python, which torch 2.14 wraps.

    The wrapper passes on only `wait` and `get_future`: a script that polls `is_completed` would never end,
    and `recv` without a source would raise an error. For other works the future agrees with `is_completed`.
    """
    is_completed, source_rank = Work.is_completed, Work._source_rank

    def is_completed_or_done(work: Work) -> bool:
        if is_completed(work):
            return True
        try:
            return work.get_future().done()
        except RuntimeError:  # a work without a future
            return False

    def source_of(work: Work) -> int:
        try:
            return source_rank(work)
        except RuntimeError:
            value = work.get_future().value() if work.is_completed() else None
            if not isinstance(value, Tensors):
                raise
            return value.source

    Work.is_completed, Work._source_rank = is_completed_or_done, source_of  # type: ignore[method-assign,assignment]


class _Task(NamedTuple):
    work: GroupWork
    run: Callable[[], None]


class Lane:
    """Runs a group's operations in order. Safe from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._tasks: deque[_Task] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._wake = threading.Semaphore(0)
        self._closed = False

    def start(self, work: GroupWork, run: Callable[[], None], *, here: bool) -> GroupWork:
        """Starts an operation, which ends `work`.

        Args:
            work: The operation's work.
            run: Exchanges. It raises an error if the operation failed.
            here: Whether the caller waits for it, so that it may run in the calling thread.
        """
        task = _Task(work, run)
        with self._lock:
            if self._thread is threading.current_thread():  # a callback, which may wait for this operation
                self._thread, self._busy = None, bool(self._tasks)
                if self._busy:
                    self._wake_thread()
            if self._closed:
                raise DistBackendError("the process group was destroyed or aborted: make a new one")
            if not (here and not self._busy):
                self._tasks.append(task)
                if not self._busy:
                    self._busy = True
                    self._wake_thread()
                return work
            self._busy = True
        try:
            _run(task)
        finally:  # also after an interrupt
            with self._lock:
                self._busy = bool(self._tasks)
                if self._busy:
                    self._wake_thread()
        return work

    def close(self, error: BaseException) -> None:
        """Fails the operations that have not begun. Later ones are refused."""
        with self._lock:
            self._closed = True
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            task.work.finish(error)
        self._wake.release()

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._wake.release()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            while True:
                with self._lock:
                    task = self._tasks.popleft() if self._tasks else None
                    if task is None:
                        self._busy = False
                        break
                _run(task)
                if self._thread is not threading.current_thread():  # another one has taken over
                    return
            if self._closed:
                return


def _run(task: _Task) -> None:
    try:
        task.run()
    except Exception as error:  # any error: a caller waits for the work
        task.work.finish(error)
    else:
        task.work.finish()
