"""Copies between an accelerator and the host: two queues beside the training queue, and marks in them.

Invariant: no call here blocks the calling thread. Queues wait for each other's marks.
If the host must wait for a mark, a separate thread does
(`hubring.workers.buckets.device_waiter`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hubring.ps.store.gpu_tensor import Mark


class Device(Protocol):
    """An accelerator's queues. Safe to use from any thread."""

    def mark(self) -> Mark:
        """Returns a mark after the training work that the calling thread has queued so far."""

    def copy_out(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Queues a copy from the device to pinned memory, after `after`. Returns the mark after the copy."""

    def copy_in(self, source: Tensor, target: Tensor, after: Mark | None = None) -> None:
        """Queues a copy to the device from pinned or device memory, in a queue for such copies only."""

    def landed(self) -> Mark:
        """Returns a mark after all copies to the device so far."""

    def follow(self, mark: Mark) -> None:
        """Makes training work that the calling thread queues from now on wait for `mark`."""


class CudaDevice:
    """A CUDA device. Training runs on the caller's current stream, copies on two other streams.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream per direction: the bus and the copy engines run both directions at once.
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
        _wait_for(torch.cuda.current_stream(self._device), mark)


def _copy(stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: Mark | None) -> None:
    if after is not None:
        _wait_for(stream, after)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    for tensor in (source, target):
        if tensor.is_cuda:  # the allocator must not reuse its memory before this stream is done
            tensor.record_stream(stream)


def _record(stream: torch.cuda.Stream) -> Mark:
    # With a blocking event the waiting thread sleeps; with another one it spins.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _wait_for(stream: torch.cuda.Stream, mark: Mark) -> None:
    assert isinstance(mark, torch.cuda.Event)
    stream.wait_event(mark)
