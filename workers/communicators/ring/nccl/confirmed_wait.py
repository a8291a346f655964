"""How the host waits for the operations of a ring that heals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from hubring.ps.core.errors import RingBroken
from hubring.workers.communicators.ring.work import RingWork

POLL_SECONDS = 2e-4

EVENT_SECONDS = 1.0
"""How long an event behind an operation may come after it."""


class ConfirmedWait:
    """Waits until an operation has ended on all members.

    A GPU's operation is waited for on a stream of its own: what the script queues must not wait behind an
    operation that never ends.

    Args:
        device: Where the operations run.
        confirm: Waits until all members have called it as often.
    """

    def __init__(self, device: torch.device, confirm: Callable[[], None]) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._confirm = confirm
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
        else:
            torch.cuda.set_device(self._stream.device)  # or this thread would begin to use the first GPU
            with torch.cuda.stream(self._stream):
                handle.synchronize()  # the stream waits; `wait` could abort NCCL while operations start
                await_end(handle, self._event().query)
                work.settle(handle)
                self._event().synchronize()

    def _event(self) -> torch.cuda.Event:
        """Returns an event behind what the stream has queued."""
        assert self._stream is not None
        event: torch.cuda.Event = self._stream.record_event(
            torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        )
        return event


def await_end(handle: Any, ended: Callable[[], bool]) -> None:
    """Waits until an operation of NCCL has ended.

    Args:
        handle: torch's handle of it.
        ended: Whether an event behind it has come.

    Raises:
        RuntimeError: NCCL has reported an error. torch then calls the operation complete, but it may not end.
    """
    while not handle.is_completed():
        time.sleep(POLL_SECONDS)
    limit = time.monotonic() + EVENT_SECONDS
    while not ended():
        if time.monotonic() > limit:
            raise RuntimeError("NCCL has reported an error, which is in its log with NCCL_DEBUG=WARN")
        time.sleep(POLL_SECONDS)
