"""Sums of gradients in a fixed order, so that a rerun is bitwise equal; checks for NaN and infinity; zeros.

Large zeroed tensors use huge pages. Compiled loops (`hubring.ps.optim.llvm_loops`) need llvmlite, which the
extra `fast` installs and only the first call of `loops_work` imports. Without it torch's kernels are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Sequence
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hubring.ps.core import huge_pages
from hubring.ps.core.errors import NonFinite
from hubring.ps.core.packages import how_to_install

if TYPE_CHECKING:
    from hubring.ps.optim.llvm_loops import Loop

log = logging.getLogger(__name__)


@cache
def loops_work() -> bool:
    """Returns whether loops can be compiled and run on this host; logs the reason if not."""
    try:
        import llvmlite.binding  # noqa: F401
    except ImportError:
        log.info("optimizers use torch's slower kernels: %s", how_to_install("llvmlite"))
        return False
    if not _may_run():
        log.warning("this process cannot run generated code; optimizers use torch's slower kernels")
        return False
    from hubring.ps.optim.llvm_loops import Loop

    try:
        Loop(1, 1, (), lambda at, own, read, _: [at.add(own[0], read[0])])
    except (RuntimeError, OSError) as error:
        log.warning("LLVM cannot compile loops (%s); optimizers use torch's slower kernels", error)
        return False
    return True


def _may_run() -> bool:
    """Returns whether this process may execute memory that it wrote; SELinux or systemd can forbid it."""
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE)) as page:
        byte = ctypes.c_char.from_buffer(page)
        allowed: int = libc.mprotect(ctypes.addressof(byte), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
        del byte  # the mapping cannot be closed while a reference exists
    return allowed == 0


def zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns a flat tensor as `torch.zeros` does."""
    nbytes = numel * dtype.itemsize
    if nbytes < huge_pages.HUGE_BYTES:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    return torch.frombuffer(huge_pages.memory(nbytes), dtype=dtype)


def zeros_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor as `torch.zeros_like` does, on the tensor's device."""
    if tensor.device.type != "cpu":
        return torch.zeros_like(tensor, dtype=dtype)
    return zeros(tensor.numel(), dtype or tensor.dtype).view(tensor.shape)


def all_finite(tensor: Tensor) -> bool:
    """Returns whether no element is NaN or infinite.

    A sum with such an element is never finite, so one reduction is enough and needs no memory of the
    tensor's size. Only if the sum is not finite, each element is checked: a sum of finite elements can
    overflow.
    """
    return isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


MOST = 16
"""The most tensors that one loop reads; the processor must prefetch each as a separate stream."""
WORTH = 1 << 15
"""The fewest elements for a compiled loop. Smaller tensors fit in a cache, where a pass costs very little,
and a loop's call takes about 10 us longer than torch's. A single push of 4 KB took 0.175 ms instead of 0.168
with SGD, and 0.183 instead of 0.157 with Adam."""


def summed(gradients: Sequence[Tensor], scratch: Tensor) -> Tensor:
    """Returns the sum, in the front of `scratch`; a single gradient of its dtype is returned itself.

    Args:
        gradients: Flat, of one length and dtype; only read.
        scratch: At least as long, with the same dtype or a wider one, in which they are then summed.
    """
    alike = gradients[0].dtype is scratch.dtype
    if alike and len(gradients) == 1:
        return gradients[0]
    total = scratch[: gradients[0].numel()]
    if alike:
        torch.add(gradients[0], gradients[1], out=total)
    else:
        total.copy_(gradients[0])
    for gradient in gradients[2 if alike else 1 :]:
        total.add_(gradient)
    return total


def finite_sum(gradients: Sequence[Tensor], scratch: Tensor) -> Tensor:
    """Returns the sum as `summed` does, and checks it.

    Raises:
        NonFinite: The sum has a NaN or an infinity.
    """
    if fits_loops(gradients[0]) and 1 < len(gradients) <= MOST:
        total = scratch[: gradients[0].numel()]
        finite = isfinite(_sum_into(total, gradients)) or bool(total.isfinite().all())
    else:
        total = summed(gradients, scratch)
        finite = all_finite(total)
    if not finite:
        raise NonFinite("the sum of the gradients is not finite")
    return total


def fits_loops(tensor: Tensor) -> bool:
    """Returns whether compiled loops support this tensor and are faster for it."""
    fits = tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.numel() >= WORTH
    return fits and loops_work()


def _sum_into(total: Tensor, gradients: Sequence[Tensor]) -> float:
    """Adds gradients in one pass; returns the sum of the result's elements."""
    loop = _adding(len(gradients))
    elements = loop([total], gradients, {})
    whole = total.numel() // loop.lanes * loop.lanes
    if whole < total.numel():
        elements += float(summed([gradient[whole:] for gradient in gradients], total[whole:]).sum())
    return elements


@cache
def _adding(count: int) -> Loop:
    from hubring.ps.optim.llvm_loops import Loop

    return Loop(1, count, (), lambda at, _, gradients, __: [at.sum(gradients)] * 2, adds_up=True)
