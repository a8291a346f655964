"""A reduction and its factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hubring.ps.core.messages import ReduceOp
from hubring.workers.horovod.reduce_ops import OURS, Adasum, Average
from hubring.workers.horovod.world.process_set import ProcessSet, global_process_set


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction and its factors.

    Integer tensors are scaled as in Horovod: in float64, truncated toward zero. Their average is the sum,
    divided in the same way.

    Attributes:
        op: One of the constants of `hubring.workers.horovod.reduce_ops`.
        prescale: Multiplies tensors before the reduction.
        postscale: Multiplies tensors after the reduction.
    """

    op: int
    prescale: float = 1.0
    postscale: float = 1.0

    def check(self, process_set: ProcessSet) -> None:
        """Refuses the calls that Horovod refuses.

        Raises:
            NotImplementedError: Adasum of a process set, or of a number of ranks that is not a power of 2.
        """
        if self.op != Adasum:
            return
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        size = len(process_set.ranks)
        if size & (size - 1):
            raise NotImplementedError(f"Adasum needs a power of 2 of ranks, but the job has {size}.")

    def wire(self, tensors: Sequence[torch.Tensor]) -> ReduceOp:
        """Returns the operation of the exchange.

        Raises:
            ValueError: The average of booleans.
        """
        if self.op == Average and any(tensor.dtype is torch.bool for tensor in tensors):
            raise ValueError("no average of torch.bool; use op=hvd.Max for any(), or op=hvd.Min for all()")
        return ReduceOp.SUM if self._divides(tensors) else OURS[self.op]

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor to send."""
        return scaled(tensor.detach(), self.prescale)

    def after(self, results: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
        """Returns the results for the script, from the results of the exchange."""
        if self._divides(results):
            results = [_divided(result, ranks) for result in results]
        return [scaled(result, self.postscale) for result in results]

    def _divides(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self.op == Average and not all(tensor.is_floating_point() for tensor in tensors)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns the tensor times `factor` in its dtype; the same tensor if `factor` is 1."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def _divided(tensor: torch.Tensor, by: int) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor / by
    return torch.div(tensor, by, rounding_mode="trunc")
