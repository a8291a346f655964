"""Loss scaling: what a `torch.amp.GradScaler` asks of an optimizer that unscales for itself.

Before it calls `step()` the scaler looks for infinities and sets `found_inf` on
the optimizer; it sets `grad_scale` too, but to None where the script called
`scaler.unscale_(optimizer)` already.
"""

from __future__ import annotations

import torch

from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.communicators.base import Communicator


def overflowed(found_inf: torch.Tensor, communicator: Communicator, timeout: float | None) -> bool:
    """Whether this step must be skipped: one rank's infinity is everybody's.

    Where workers step, gradients are means already and every rank found the same.
    Where ranks do not keep step with each other, each skips for itself.
    """
    if communicator.steps_on == "worker" or communicator.size == 1 or not communicator.lockstep:
        return bool(found_inf.item())
    call = Call(Collective.ALLREDUCE, "scaler.found_inf", ReduceOp.MAX)
    return bool(communicator.collective(call, found_inf.reshape(1)).get(timeout).item())


def unscale(buckets: list[Bucket], grad_scale: torch.Tensor | None) -> None:
    """Divides all gradients by the scale, in place; None: that was done."""
    if grad_scale is None:
        return
    inverse = grad_scale.double().reciprocal().float().item()
    for bucket in buckets:
        bucket.collect()
        bucket.gradients.mul_(inverse)
