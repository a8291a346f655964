"""One way to reduce: the operation, and the factors before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hubring.ps.core.messages import ReduceOp
from hubring.workers.horovod.reduce_ops import OURS, Adasum, Average
from hubring.workers.horovod.world.process_set import ProcessSet, global_process_set


@dataclass(frozen=True, slots=True)
class Reduction:
    """What an allreduce does to tensors.

    A whole number is scaled as Horovod scales it: in float64, cut towards zero.
    Its average is the sum, divided likewise.

    Attributes:
        op: One of the constants of `hubring.workers.horovod.reduce_ops`.
        prescale: What tensors are multiplied by before they are reduced.
        postscale: And after.
    """

    op: int
    prescale: float = 1.0
    postscale: float = 1.0

    def check(self, process_set: ProcessSet) -> None:
        """Refuses what Horovod refuses.

        Raises:
            NotImplementedError: Adasum of a process set, or of a number of ranks that is no power of 2.
        """
        if self.op != Adasum:
            return
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        size = len(process_set.ranks)
        if size & (size - 1):
            raise NotImplementedError(f"Adasum needs a power of 2 of ranks, and there are {size}.")

    def wire(self, tensors: Sequence[torch.Tensor]) -> ReduceOp:
        """The operation that is exchanged for.

        Raises:
            ValueError: It has no meaning for booleans.
        """
        if self.op == Average and any(tensor.dtype is torch.bool for tensor in tensors):
            raise ValueError("there is no average of torch.bool: give op=hvd.Max for any, hvd.Min for all")
        return ReduceOp.SUM if self._divides(tensors) else OURS[self.op]

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that travels."""
        return scaled(tensor.detach(), self.prescale)

    def after(self, results: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
        """What the ranks get, of what was exchanged."""
        if self._divides(results):
            results = [_divided(result, ranks) for result in results]
        return [scaled(result, self.postscale) for result in results]

    def _divides(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self.op == Average and not all(tensor.is_floating_point() for tensor in tensors)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The tensor times `factor`, of its own dtype; itself where that changes nothing."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def _divided(tensor: torch.Tensor, by: int) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor / by
    return torch.div(tensor, by, rounding_mode="trunc")
