"""Pinned host memory: a GPU copies to and from it at bus speed, without the CPU."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError

Allocate = Callable[[int, torch.dtype], Tensor]
"""Makes a flat zeroed CPU tensor with a number of elements, as `Communicator.allocate` does."""


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
        return torch.zeros(numel, dtype=dtype, pin_memory=True)
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
