"""What a script may give to an operation: dense tensors whose elements lie in one piece."""

from __future__ import annotations

import torch

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, without what autograd knows of it.

    Nothing here needs tensors in one piece. Horovod does, and scripts that ask whether a view can be
    sent are told the same.

    Raises:
        ValueError: It is sparse, of another dtype, or a view such as a transpose.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError(
            f"Tensor is required to be contiguous, but one of shape {tuple(tensor.shape)} has strides"
            f" {tensor.stride()}: call contiguous()"
        )
    return tensor.detach()
