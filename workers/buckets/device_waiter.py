"""The thread that waits for a device so that the training thread need not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import torch

from hubring.ps.core.work import Work
from hubring.ps.store.gpu_tensor import Mark


class _Errand(NamedTuple):
    mark: Mark
    then: Callable[[], object]
    work: Work


class DeviceWaiter:
    """Does what waits for marks, in the order in which it was told; its thread ends with it.

    Marks of one queue are reached in order, so whoever waits for one after the other is late for none.

    Attributes:
        end: Ends the thread after the errands so far; called by itself when nobody has the waiter any more.
    """

    def __init__(self) -> None:
        self._errands: SimpleQueue[_Errand | None] = SimpleQueue()
        # The thread knows the queue alone, so that it keeps nobody alive who could end it.
        threading.Thread(target=_run, args=(self._errands,), name="device waiter", daemon=True).start()
        self.end = weakref.finalize(self, self._errands.put, None)
        self.end.atexit = False  # a daemon that stays asleep is in nobody's way then

    def carry(self, mark: Mark, then: Callable[[], object], work: Work) -> None:
        """Calls `then()` once `mark` is reached; `work` fails with what either of them raises."""
        self._errands.put(_Errand(mark, then, work))


def _run(errands: SimpleQueue[_Errand | None]) -> None:
    torch.get_num_threads()  # a thread that never asked has MKL take every core (torch 2.13)
    while (errand := errands.get()) is not None:
        try:
            errand.mark.synchronize()
            errand.then()
        except Exception as error:  # whatever it is, somebody waits for this work
            errand.work.fail(error)
        del errand  # while nothing is to do, nobody's memory is held
