"""Host memory beside a bucket's device memory, for wires that cannot read a GPU.

On the CPU a tensor is its own mirror and nothing is copied. A CUDA tensor's
mirror is pinned, so that copies run at the bus's speed. Both are made for one
rhythm: download, exchange, upload, and only then download again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from ps.errors import ConfigError

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Makes a flat zeroed CPU tensor of so many elements; `Communicator.allocate` is one."""


class Mirror(Protocol):
    """A flat tensor as the host sees it."""

    @property
    def host(self) -> torch.Tensor:
        """The flat CPU tensor; it begins with the device's contents and lives as long as the mirror."""

    def download(self) -> None:
        """Copies device to host, behind the work queued so far; returns when the host has it."""

    def upload(self) -> None:
        """Copies host to device, ahead of the work queued next; returns at once."""

    def settle(self) -> None:
        """Waits until the last upload has read the host's side, which may then be overwritten."""


def mirror(tensor: torch.Tensor, allocate: Allocate) -> Mirror:
    """Gives `tensor` its mirror: itself on the CPU, pinned memory from `allocate` on CUDA."""
    if tensor.device.type == "cpu":
        return SameMemory(tensor)
    if tensor.device.type == "cuda":
        return PinnedMirror(tensor, allocate)
    raise ConfigError(f"parameters are on {tensor.device}; only cpu and cuda devices can be exchanged")


class SameMemory:
    """The mirror of a CPU tensor: itself, so there is nothing to copy or to wait for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host = tensor

    def download(self) -> None:
        pass

    def upload(self) -> None:
        pass

    def settle(self) -> None:
        pass


class PinnedMirror:
    """The mirror of a CUDA tensor. Nothing is allocated until the host's side is asked for."""

    def __init__(self, tensor: torch.Tensor, allocate: Allocate) -> None:
        self._tensor = tensor
        self._allocate = allocate
        # A blocking event lets the waiting thread sleep where others would spin.
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @cached_property
    def host(self) -> torch.Tensor:
        host = self._allocate(self._tensor.numel(), self._tensor.dtype)
        _pin(host, self)
        return host.copy_(self._tensor)

    def download(self) -> None:
        self._copy(self._tensor, self.host)
        self.settle()

    def upload(self) -> None:
        if "host" in vars(self):  # a ring never asks for it
            self._copy(self.host, self._tensor)

    def settle(self) -> None:
        self._copied.synchronize()

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.cuda.device(self._tensor.device):
            target.copy_(source, non_blocking=True)
            self._copied.record()


def _pin(host: torch.Tensor, owner: PinnedMirror) -> None:
    """Page-locks memory that CUDA did not allocate, for as long as `owner` lives."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if code != 0:
        raise ConfigError(
            f"cannot pin {host.nbytes} bytes of host memory (cudaHostRegister: {code}); raise ulimit -l"
        )
    weakref.finalize(owner, cudart.cudaHostUnregister, host.data_ptr())
