"""Moves a bucket between its device and host memory.

A bucket on the CPU is sent from where it is. For a GPU the order is

    copy out     after the work that backward had queued when the bucket was sent
    exchange     after the copy out, started by a thread (`DeviceWaiter`)
    copy in      after the answer, queued by the thread that received it
    training     after the copy in; only the training stream waits for it

so the training thread never waits for the device. When an answer is copied in, no kernel
still reads old values or writes gradients: such kernels were queued before the exchange,
and the exchange started after they had finished.

Copies run in two queues beside the training queue, with marks in them. No call of a `Device` blocks the
calling thread: queues wait for each other's marks. If the host must wait for a mark, a `DeviceWaiter` does.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hubring.ps.compression.gpu_tensor import Mark
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.work import Work

Allocate = Callable[[int, torch.dtype], Tensor]
"""Makes a flat zeroed CPU tensor with a number of elements, as `Communicator.allocate` does."""


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


def pinned(numel: int, dtype: torch.dtype, allocate: Allocate) -> Tensor:
    """Returns a flat zeroed tensor in pinned memory, in the transport's memory if that can be pinned.

    Pinning works on whole pages. Allocations of a shared segment start at a page and share no page.
    Heap memory shares pages, so it is not pinned. A transport that uses heap memory can send from any
    memory, so it gets torch's pinned memory.

    Raises:
        ConfigError: The system does not allow this process to pin that much memory.
    """
    memory = allocate(numel, dtype)
    if not starts_at_page(memory):
        return torch.zeros(numel, dtype=dtype, pin_memory=True, device="cpu")
    _register(memory)
    return memory


def starts_at_page(memory: Tensor) -> bool:
    """Whether the memory starts at a page, as memory does that is allocated in whole pages."""
    return memory.numel() > 0 and memory.data_ptr() % mmap.PAGESIZE == 0


def _register(memory: Tensor) -> None:
    """Page-locks memory that CUDA did not allocate, for as long as the tensor lives."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code != 0:
        raise ConfigError(
            f"cannot pin {memory.nbytes} bytes of host memory (cudaHostRegister: {code}); increase ulimit -l"
        )
    weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())


Start = Callable[[], Work]
"""Starts an exchange of a bucket's host memory."""

Lands = Literal["values", "gradients"]
"""The kind of answer: new values, or the mean gradient."""


class ThroughHost:
    """One bucket on a device in pinned memory on the host: flat CPU tensors. New values land in `values`.

    The host tensors are made at first use, with the device's contents. A ring never uses them.

    Args:
        gradients: Flat gradients on the device.
        values: Flat memory on the device in which new values land.
        device: Queues the copies.
        waiter: Waits for the device.
        pin: Makes flat pinned memory.
    """

    def __init__(
        self, gradients: Tensor, values: Tensor, device: Device, waiter: DeviceWaiter, pin: Allocate
    ) -> None:
        self.device = device
        self._there = {"gradients": gradients, "values": values}
        self._waiter = waiter
        self._pin = pin
        self._landed: Mark | None = None

    @cached_property
    def gradients(self) -> Tensor:
        return self._mirrored("gradients")

    @cached_property
    def values(self) -> Tensor:
        return self._mirrored("values")

    def push_pull(self, what: str, start: Start, lands: Lands) -> Work:
        """Copies the gradients to the host, starts the exchange, and copies the answer to the device.

        Args:
            what: Name of the exchange, for error messages.
            start: Starts the exchange and returns its work. It runs later, in another thread.
            lands: The host tensor to which the exchange writes its answer.

        Returns:
            A work that is done when the copy to the device is queued. Then call `Bucket.arrive`.
        """
        here = self.gradients if lands == "gradients" else self.values
        ready = self.device.copy_out(self._there["gradients"], self.gradients, self.device.mark())
        return self._exchange(what, ready, start, lambda: self.device.copy_in(here, self._there[lands]))

    def pull(self, what: str, start: Start) -> Work:
        """As `push_pull`, for an exchange that only returns values."""
        # The mark is also after the last copy in, which read the memory that this answer overwrites.
        values = self.values
        return self._exchange(
            what, self.device.mark(), start, lambda: self.device.copy_in(values, self._there["values"])
        )

    def in_place(self, what: str, start: Start) -> Work:
        """Starts an exchange that reads gradients on the device and queues its own copy of the answer."""
        return self._exchange(what, self.device.mark(), start, None)

    def arrive(self) -> None:
        """Makes work that is queued from now on wait for the last answer. `Bucket.arrive` calls it."""
        if self._landed is not None:
            self.device.follow(self._landed)

    def give_up_values(self) -> None:
        """Releases the values, which are not exchanged from now on."""
        self._there["values"] = self._there["values"].new_empty(0)
        self.__dict__.pop("values", None)  # the mirror, if it was made

    def _exchange(self, what: str, ready: Mark, start: Start, copy_in: Callable[[], None] | None) -> Work:
        whole = Work(what)

        def answered(work: Work) -> None:
            try:
                work.wait(0)  # raises the exchange's error
                if copy_in is not None:
                    copy_in()
                self._landed = self.device.landed()
            except Exception as error:  # any error: a caller waits for this exchange
                whole.fail(error)
            else:
                whole.complete_part()

        self._waiter.run_after(ready, lambda: start().when_done(answered), whole)
        return whole

    def _mirrored(self, name: str) -> Tensor:
        there = self._there[name]
        return self._pin(there.numel(), there.dtype).copy_(there)


class Staging:
    """Makes the stages of one model's buckets. Buckets on one device share its queues and a waiter.

    Args:
        allocate: Makes host memory that the transport sends fast.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._devices: dict[torch.device, tuple[Device, DeviceWaiter]] = {}

    def stage(self, gradients: Tensor, values: Tensor) -> ThroughHost | None:
        """Returns the stage of a bucket; None on the CPU, where a bucket is exchanged in place.

        Raises:
            ConfigError: The bucket is on an unsupported device.
        """
        device = gradients.device
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            raise ConfigError(
                f"parameters are on {device}; only cpu and cuda are supported: move the model to one of them"
            )
        if device not in self._devices:
            self._devices[device] = CudaDevice(device), DeviceWaiter()
        memory = partial(pinned, allocate=self._allocate)
        return ThroughHost(gradients, values, *self._devices[device], memory)
