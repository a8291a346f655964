"""What staging asks of an accelerator: two queues for copies beside the one that trains, and marks in them.

The law: no call in here makes the calling thread wait. Queues wait for each
other by marks, and whoever must know on the host that a mark was reached waits
for it in a thread of its own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hubring.ps.store.gpu_tensor import Mark


class Device(Protocol):
    """An accelerator's queues; for any thread."""

    def mark(self) -> Mark:
        """A mark behind what the calling thread has queued for training so far."""

    def copy_out(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Queues a copy from the device to pinned memory behind `after`; returns the mark behind it."""

    def copy_in(self, source: Tensor, target: Tensor, after: Mark | None = None) -> None:
        """Queues a copy to the device, from pinned memory or its own, in a queue that has nothing else."""

    def landed(self) -> Mark:
        """A mark behind all copies in so far."""

    def follow(self, mark: Mark) -> None:
        """Lets what the calling thread queues for training from now on wait for `mark`."""


class CudaDevice:
    """A CUDA device: training runs on whatever stream is the caller's current one, copies on two others.

    Args:
        device: Which one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for each direction: the bus and the copy engines take both at once.
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        return _record(torch.cuda.current_stream(self._device))

    def copy_out(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        _copy(self._out, source, target, after)
        return _record(self._out)

    def copy_in(self, source: Tensor, target: Tensor, after: Mark | None = None) -> None:
        _copy(self._in, source, target, after)

    def landed(self) -> Mark:
        return _record(self._in)

    def follow(self, mark: Mark) -> None:
        _behind(torch.cuda.current_stream(self._device), mark)


def _copy(stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: Mark | None) -> None:
    if after is not None:
        _behind(stream, after)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    for tensor in (source, target):
        if tensor.is_cuda:  # its memory must not be given away before this stream is done with it
            tensor.record_stream(stream)


def _record(stream: torch.cuda.Stream) -> Mark:
    # A blocking event lets the waiting thread sleep where others would spin.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _behind(stream: torch.cuda.Stream, mark: Mark) -> None:
    assert isinstance(mark, torch.cuda.Event)
    stream.wait_event(mark)
