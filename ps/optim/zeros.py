"""Zeroed tensors on the CPU; large tensors use huge pages."""

from __future__ import annotations

import torch
from torch import Tensor

from hubring.ps.core import huge_pages


def zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns a flat tensor as `torch.zeros` does."""
    nbytes = numel * dtype.itemsize
    if nbytes < huge_pages.HUGE_BYTES:
        return torch.zeros(numel, dtype=dtype)
    return torch.frombuffer(huge_pages.memory(nbytes), dtype=dtype)


def zeros_like(tensor: Tensor) -> Tensor:
    """Returns a tensor as `torch.zeros_like` does, on the tensor's device."""
    if tensor.device.type != "cpu":
        return torch.zeros_like(tensor)
    return zeros(tensor.numel(), tensor.dtype).view(tensor.shape)
