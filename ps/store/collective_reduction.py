"""Reductions of the tensors of many ranks, in rank order, so that a rerun is bitwise equal.

Half-precision sums and products are computed in float32 and rounded once. A sum of
booleans is their `or`, a product their `and`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hubring.ps.core.messages import ReduceOp

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype in which half-precision tensors are reduced."""


def objection_to(op: ReduceOp, dtype: str) -> str:
    """Returns why a reduction does not support a dtype; empty if it does."""
    if getattr(torch, dtype).is_floating_point or op not in (ReduceOp.AVERAGE, ReduceOp.ADASUM):
        return ""
    return f"{op.name.lower()} does not support torch.{dtype}; use sum, or convert to a floating dtype"


def reduced(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Reduces tensors of one shape and dtype to one new tensor."""
    dtype = tensors[0].dtype
    if op is ReduceOp.ADASUM:
        return adasum([tensor.to(WIDER.get(dtype, dtype)) for tensor in tensors]).to(dtype, copy=True)
    wide = dtype if op in (ReduceOp.MIN, ReduceOp.MAX) else WIDER.get(dtype, dtype)
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        _reduce_into(total, tensor.to(wide), op)
    return averaged(total, len(tensors), op).to(dtype)


def averaged(total: Tensor, count: int, op: ReduceOp) -> Tensor:
    """Divides a sum over `count` ranks in place if `op` is an average."""
    return total.div_(count) if op is ReduceOp.AVERAGE else total


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Adds the orthogonal parts of gradients and averages their parallel parts.

    Reduces pairs of neighbours repeatedly (Maleki et al., MLSys 2021):

        adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

    In an odd count, the last tensor moves to the next level unchanged. Inner
    products are computed in float64.
    """
    while len(tensors) > 1:
        pairs = [_adasum_of_two(one, two) for one, two in zip(tensors[::2], tensors[1::2], strict=False)]
        tensors = [*pairs, *tensors[len(tensors) & ~1 :]]
    return tensors[0]


def _adasum_of_two(one: Tensor, two: Tensor) -> Tensor:
    first, second = one.reshape(-1).double(), two.reshape(-1).double()
    common = float(first @ second)
    own, other = float(first @ first), float(second @ second)
    # A zero has no direction, so nothing is subtracted for it.
    share = 1 - common / (2 * own) if own else 1.0
    return one * share + two * (1 - common / (2 * other) if other else 1.0)


def _reduce_into(total: Tensor, tensor: Tensor, op: ReduceOp) -> None:
    match op:
        case ReduceOp.SUM | ReduceOp.AVERAGE:
            total.add_(tensor)
        case ReduceOp.PRODUCT:
            total.mul_(tensor)
        case ReduceOp.MIN:
            torch.minimum(total, tensor, out=total)
        case ReduceOp.MAX:
            torch.maximum(total, tensor, out=total)
