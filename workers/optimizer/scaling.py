"""Loss scaling: what a `torch.amp.GradScaler` needs from an optimizer that unscales itself.

Before it calls `step()`, the scaler sets `found_inf` and `grad_scale` on the optimizer.
`grad_scale` is None if the script already called `scaler.unscale_(optimizer)`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.workers.communicators.base import Communicator


def overflowed(found_inf: torch.Tensor, communicator: Communicator, timeout: float | None) -> bool:
    """Whether this step must be skipped: if one rank found an infinity, all ranks skip.

    Where workers step, gradients are already means, so every rank finds the same.
    Ranks that are not in lockstep skip independently.
    """
    if communicator.steps_on == "worker" or communicator.size == 1 or not communicator.lockstep:
        return bool(found_inf.item())
    call = Call(Collective.ALLREDUCE, "scaler.found_inf", ReduceOp.MAX)
    return bool(communicator.collective(call, found_inf.reshape(1)).get(timeout).item())


def unscale(parameters: Iterable[torch.nn.Parameter], grad_scale: torch.Tensor | None) -> None:
    """Divides the parameters' gradients by the scale, in place. With None they are already unscaled."""
    if grad_scale is None:
        return
    inverse = grad_scale.double().reciprocal().float().item()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.detach().mul_(inverse)
