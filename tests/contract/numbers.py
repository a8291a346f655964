"""What ranks give to a collective, and what must come of it."""

from __future__ import annotations

import torch
from torch import Tensor

from hubring.ps.core.messages import ReduceOp
from hubring.ps.core.types import DTYPE_BYTES
from hubring.ps.store.collective import adasum

DTYPES = [getattr(torch, name) for name in DTYPE_BYTES]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = [3, 4]
"""An odd number and a power of two; most other contracts have two ranks."""
LARGE = 3001
"""Elements of what a ring does not gather but reduces by torch.distributed."""


def given_by(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small numbers, different on every rank, of which no reduction of four overflows an int8."""
    numbers = torch.arange(torch.Size(shape).numel()).add(rank * 3).remainder(4).reshape(shape)
    if dtype is torch.bool:
        return numbers.ge(2)
    return numbers.to(dtype).sub(0 if dtype is torch.uint8 else 1)


def expected(parts: list[Tensor], op: ReduceOp) -> Tensor:
    stack = torch.stack(parts)
    if stack.dtype is torch.bool:
        return stack.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX) else stack.all(0)
    wide = stack.double() if stack.is_floating_point() else stack.long()
    match op:
        case ReduceOp.SUM:
            total = wide.sum(0)
        case ReduceOp.AVERAGE:
            total = wide.mean(0)
        case ReduceOp.MIN:
            total = wide.amin(0)
        case ReduceOp.MAX:
            total = wide.amax(0)
        case ReduceOp.PRODUCT:
            total = wide.prod(0)
        case ReduceOp.ADASUM:
            total = adasum(list(wide))
    return total.to(stack.dtype)


def ops(dtype: torch.dtype) -> list[ReduceOp]:
    averaging = (ReduceOp.AVERAGE, ReduceOp.ADASUM)
    return [op for op in ReduceOp if dtype.is_floating_point or op not in averaging]
