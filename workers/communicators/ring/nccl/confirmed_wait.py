"""How the host waits for the operations of a ring that heals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from hubring.ps.core.errors import RingBroken
from hubring.workers.communicators.ring.work import RingWork

POLL_SECONDS = 2e-4


class ConfirmedWait:
    """Waits until an operation has ended on all members.

    A GPU's operation is waited for on a stream of its own: what the script queues must not wait behind an
    operation that never ends. Only an event tells of its end. torch's handle would abort NCCL in this thread
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
