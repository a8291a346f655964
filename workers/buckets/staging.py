"""A bucket's way between its device and the wire.

On the CPU there is none: a bucket lies where it is sent from. From a GPU the law is

    copy out     after what backward had queued when the bucket was handed over
    hand-over    after the copy out, by a thread that waits for it (`hubring.workers.buckets.device_waiter`)
    copy in      after the answer, queued by the thread that received it
    training     after the copy in: its stream waits for it, no thread does

so the training thread never waits for the device. Nothing that reads old values
or writes to gradients can be running when an answer is copied in: it was queued
before the hand-over, and the exchange began when all that was done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.work import Work
from hubring.ps.store.gpu_tensor import Mark
from hubring.workers.buckets.device_copies import CudaDevice, Device
from hubring.workers.buckets.device_waiter import DeviceWaiter
from hubring.workers.buckets.pinning import Allocate, pinned

Start = Callable[[], Work]
"""Begins an exchange with the host's side of a bucket."""

Lands = Literal["values", "gradients"]
"""What the answer is: new values, or the workers' mean gradient."""


class Stage(Protocol):
    """One bucket as the host sees it; `gradients` and `values` are flat CPU tensors."""

    @property
    def gradients(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...

    def push_pull(self, what: str, start: Start, lands: Lands) -> Work:
        """Brings the gradients to the host, begins the exchange, and takes back what it left there.

        Args:
            what: Is done, for an error's text.
            start: May run later, in another thread; returns the exchange's work.
            lands: Where the exchange leaves its answer.

        Returns:
            Done when the answer is on its way to the device: then `arrive`.
        """

    def pull(self, what: str, start: Start) -> Work:
        """The same for an exchange that takes no gradients and brings values."""

    def arrive(self) -> None:
        """Puts what is queued next behind the last answer; to be called once its work is done."""


class OnHost:
    """The stage of a bucket on the CPU, which lies in the memory that travels."""

    def __init__(self, gradients: Tensor, values: Tensor) -> None:
        self.gradients = gradients
        self.values = values

    def push_pull(self, what: str, start: Start, lands: Lands) -> Work:
        return start()

    def pull(self, what: str, start: Start) -> Work:
        return start()

    def arrive(self) -> None:
        """It is there."""


class ThroughHost:
    """The stage of a bucket on another device: pinned memory on the host.

    The host's side is made when it is first asked for, with the device's contents: a ring never asks.

    Args:
        gradients: On the device.
        values: On the device.
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
        here = self.gradients if lands == "gradients" else self.values
        ready = self.device.copy_out(self._there["gradients"], self.gradients, self.device.mark())
        return self._exchange(what, ready, start, lambda: self.device.copy_in(here, self._there[lands]))

    def pull(self, what: str, start: Start) -> Work:
        # The mark also lies behind the last copy in, which read what this one's answer overwrites.
        values = self.values
        return self._exchange(
            what, self.device.mark(), start, lambda: self.device.copy_in(values, self._there["values"])
        )

    def in_place(self, what: str, start: Start) -> Work:
        """An exchange that reads the gradients on the device, and has copied the answer in itself."""
        return self._exchange(what, self.device.mark(), start, _nothing)

    def arrive(self) -> None:
        if self._landed is not None:
            self.device.follow(self._landed)

    def _exchange(self, what: str, ready: Mark, start: Start, take_back: Callable[[], None]) -> Work:
        whole = Work(what)

        def answered(work: Work) -> None:
            try:
                work.wait(0)  # raises what it failed with
                take_back()
                self._landed = self.device.landed()
            except Exception as error:  # whatever it is, somebody waits for this exchange
                whole.fail(error)
            else:
                whole.complete_part()

        self._waiter.carry(ready, lambda: start().when_done(answered), whole)
        return whole

    def _mirrored(self, name: str) -> Tensor:
        there = self._there[name]
        return self._pin(there.numel(), there.dtype).copy_(there)


class Staging:
    """Makes the stages of one model's buckets; those of one device share its queues and a waiter.

    Args:
        allocate: Makes host memory that travels at its best.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._devices: dict[torch.device, tuple[Device, DeviceWaiter]] = {}

    def stage(self, gradients: Tensor, values: Tensor) -> Stage:
        """The stage of a bucket.

        Raises:
            ConfigError: It is on a device that cannot be exchanged from.
        """
        device = values.device
        if device.type == "cpu":
            return OnHost(gradients, values)
        if device.type != "cuda":
            raise ConfigError(f"parameters are on {device}; only cpu and cuda devices can be exchanged")
        if device not in self._devices:
            self._devices[device] = CudaDevice(device), DeviceWaiter()
        return ThroughHost(gradients, values, *self._devices[device], self._pinned)

    def _pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return pinned(numel, dtype, self._allocate)


def _nothing() -> None:
    """The answer is on its way already."""
