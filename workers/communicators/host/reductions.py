"""Reduce operations of torch.distributed on tensors in host memory.

Every element is reduced by one rank, or by all in the same order, so all ranks have the same bits. Half
precision is summed in single precision and rounded once. NumPy reduces the unsigned integers that torch has
no kernels for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hubring.ps.core import messages
from hubring.ps.store.collective import REDUCE_INTO, WIDER

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_WIDER = {**WIDER, **dict.fromkeys(_FLOAT8, torch.float32)}
_UNSIGNED = {torch.uint16: np.uint16, torch.uint32: np.uint32, torch.uint64: np.uint64}

Apply = Callable[[Tensor, Tensor], object]
"""Reduces the second tensor into the first."""


class _Kernel(NamedTuple):
    torch: Apply
    numpy: np.ufunc
    hub: messages.ReduceOp | None = None
    """The hub's operation; None: it has none."""


def _as_hub(op: messages.ReduceOp, numpy: np.ufunc) -> _Kernel:
    return _Kernel(REDUCE_INTO[op], numpy, op)


_KERNELS: Mapping[str, _Kernel] = {
    "SUM": _as_hub(messages.ReduceOp.SUM, np.add),
    "PRODUCT": _as_hub(messages.ReduceOp.PRODUCT, np.multiply),
    "MIN": _as_hub(messages.ReduceOp.MIN, np.minimum),
    "MAX": _as_hub(messages.ReduceOp.MAX, np.maximum),
    "BAND": _Kernel(Tensor.bitwise_and_, np.bitwise_and),
    "BOR": _Kernel(Tensor.bitwise_or_, np.bitwise_or),
    "BXOR": _Kernel(Tensor.bitwise_xor_, np.bitwise_xor),
}


class TorchReduction(NamedTuple):
    """A reduce operation.

    Attributes:
        name: A name in torch's `RedOpType` that is neither AVG nor PREMUL_SUM.
        average: Whether the sum is divided by the number of ranks.
        factor: What each contribution is multiplied by first.
    """

    name: str
    average: bool = False
    factor: float | Tensor | None = None

    def reduce(self, into: Tensor, others: Sequence[Tensor]) -> None:
        """Reduces tensors of one dtype into a flat tensor, in their order. Ignores the factor."""
        kernel, wide = _KERNELS[self.name], _WIDER.get(into.dtype, into.dtype)
        if into.dtype in _UNSIGNED:
            for one in others:
                kernel.numpy(into.numpy(), one.numpy(), out=into.numpy())
            self.divide(into, len(others) + 1)
            return
        total = into.to(wide)
        for one in others:
            kernel.torch(total, one.to(wide))
        self.divide(total, len(others) + 1)
        if total is not into:
            into.copy_(total)

    def reduce_all(self, parts: Sequence[Tensor], into: Tensor) -> None:
        """Overwrites a flat tensor with the reduction of all parts, in their order."""
        into.copy_(parts[0])
        self.reduce(into, parts[1:])

    def divide(self, total: Tensor, ranks: int) -> None:
        """Makes a sum an average, if that is the operation. Integers are rounded towards 0, as by NCCL."""
        if self.average:
            exact = total.dtype.is_floating_point or total.dtype.is_complex
            total.div_(ranks, rounding_mode=None if exact else "trunc")

    def hub_op(self, dtype: torch.dtype) -> messages.ReduceOp | None:
        """Returns the hub's own operation for a dtype; None if the hub cannot reduce it."""
        sent = dtype not in _UNSIGNED and dtype not in _FLOAT8 and not dtype.is_complex
        return _KERNELS[self.name].hub if sent else None


SUM = TorchReduction("SUM")


def reduction(op: ReduceOp | ReduceOp.RedOpType, tensors: Sequence[Tensor]) -> TorchReduction:
    """Returns the reduction for an operation of torch.distributed.

    Raises:
        TypeError: The operation does not support a tensor's dtype.
    """
    state: Any = (op, None) if isinstance(op, ReduceOp.RedOpType) else op.__getstate__()
    name = state[0].name
    for tensor in tensors:
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if name in ("BAND", "BOR", "BXOR") and floating:
            raise TypeError(f"ReduceOp.{name} needs integers or bool; the tensor is {tensor.dtype}")
        whole = name == "AVG" and tensor.dtype not in (torch.bool, *_UNSIGNED)
        if name in ("AVG", "PREMUL_SUM") and not floating and not whole:
            raise TypeError(f"ReduceOp.{name} does not support {tensor.dtype}: use SUM")
        if name in ("MIN", "MAX", "PRODUCT") and tensor.is_complex():
            raise TypeError(f"ReduceOp.{name} does not support {tensor.dtype}: reduce real tensors")
    if name in ("AVG", "PREMUL_SUM"):
        return TorchReduction("SUM", name == "AVG", state[1] if name == "PREMUL_SUM" else None)
    return TorchReduction(name)
