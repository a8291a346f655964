"""A thread that waits for a device, so that the training thread does not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import torch

from hubring.ps.core.work import Work
from hubring.ps.store.gpu_tensor import Mark


class _Task(NamedTuple):
    mark: Mark
    then: Callable[[], object]
    work: Work


class DeviceWaiter:
    """Waits for marks in the order of the calls and runs a function after each.

    Marks of one queue are reached in order, so waiting for them in order delays none.

    Attributes:
        end: Ends the thread after the current tasks. Garbage collection of the waiter calls it.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # The thread only references the queue, so it does not keep the waiter alive.
        threading.Thread(target=_run, args=(self._tasks,), name="device waiter", daemon=True).start()
        self.end = weakref.finalize(self, self._tasks.put, None)
        self.end.atexit = False  # a sleeping daemon thread does not delay the exit

    def run_after(self, mark: Mark, then: Callable[[], object], work: Work) -> None:
        """Calls `then()` once `mark` is reached. An error in either one fails `work`."""
        self._tasks.put(_Task(mark, then, work))


def _run(tasks: SimpleQueue[_Task | None]) -> None:
    torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
    while (task := tasks.get()) is not None:
        try:
            task.mark.synchronize()
            task.then()
        except Exception as error:  # any error: a caller waits for this work
            task.work.fail(error)
        del task  # an idle thread must not keep tensors alive
