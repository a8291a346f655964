"""Host memory that a GPU copies to and from at the bus's speed, without the processor."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError

Allocate = Callable[[int, torch.dtype], Tensor]
"""Makes a flat zeroed CPU tensor of so many elements; `Communicator.allocate` is one."""


def pinned(numel: int, dtype: torch.dtype, allocate: Allocate) -> Tensor:
    """A flat zeroed tensor in pinned memory: the transport's own where that has pages of its own.

    Pinning goes by the page. A shared segment's allocations begin at one and share it with nobody.
    Memory from the heap does, and a transport that sends from there sends from any: it gets torch's.

    Raises:
        ConfigError: The system does not let this process pin so much.
    """
    memory = allocate(numel, dtype)
    if not lies_in_pages_of_its_own(memory):
        return torch.zeros(numel, dtype=dtype, pin_memory=True)
    _register(memory)
    return memory


def lies_in_pages_of_its_own(memory: Tensor) -> bool:
    """Whether it begins at a page, as all memory does that comes in whole pages."""
    return memory.numel() > 0 and memory.data_ptr() % mmap.PAGESIZE == 0


def _register(memory: Tensor) -> None:
    """Page-locks memory that CUDA did not allocate, for as long as the tensor lives."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code != 0:
        raise ConfigError(
            f"cannot pin {memory.nbytes} bytes of host memory (cudaHostRegister: {code}); raise ulimit -l"
        )
    weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
