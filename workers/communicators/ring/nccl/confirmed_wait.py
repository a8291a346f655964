"""How the host waits for the operations of a ring that heals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hubring.ps.core.errors import RingBroken
from hubring.workers.communicators.ring.work import RingWork


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
                work.settle(handle)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                ended = self._stream.record_event(event)
            ended.synchronize()
