"""Moves a bucket between its device and host memory.

A bucket on the CPU is sent from where it is. For a GPU the order is

    copy out     after the work that backward had queued when the bucket was sent
    exchange     after the copy out, started by a thread (`DeviceWaiter`)
    copy in      after the answer, queued by the thread that received it
    training     after the copy in; only the training stream waits for it

so the training thread never waits for the device. When an answer is copied in, no kernel
still reads old values or writes gradients: such kernels were queued before the exchange,
and the exchange started after they had finished.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from hubring.ps.compression.gpu_tensor import Mark
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.work import Work
from hubring.workers.buckets.device import Allocate, CudaDevice, Device, DeviceWaiter, pinned

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
        self,
        gradients: Tensor,
        values: Tensor,
        device: Device,
        waiter: DeviceWaiter,
        pin: Allocate,
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
        return ThroughHost(gradients, values, *self._devices[device], self._pinned)

    def _pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return pinned(numel, dtype, self._allocate)
