"""Checks the tensors that a script passes to an operation: they must be dense and contiguous."""

from __future__ import annotations

import torch

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same tensor, detached from autograd.

    Hubring does not need contiguous tensors. It refuses others so that scripts see the same errors as in
    Horovod.

    Raises:
        ValueError: The tensor is sparse, has an unsupported dtype, or is not contiguous.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError(
            f"Tensor is required to be contiguous, but the tensor of shape {tuple(tensor.shape)} has strides"
            f" {tensor.stride()}; call contiguous()"
        )
    return tensor.detach()
