"""How a step is taken: bucket by bucket, not at all, or without a batch.

Loss scaling: before it calls `step()`, a `torch.amp.GradScaler` sets `found_inf` and `grad_scale` on an
optimizer that unscales itself. `grad_scale` is None if the script already called
`scaler.unscale_(optimizer)`.

Ranks with different numbers of batches: every rank asks once per step, at the same point of the step, whether
it has a batch or not. So all ranks take a step if one rank does, and training ends at the first step that no
rank takes. PyTorch's `Join` and Horovod's `join` have the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import ReduceOp
from hubring.ps.core.torch_internals import drop_step_hooks, has_step_hooks
from hubring.ps.optim.hyperparameters import as_number
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.collectives import allreduce
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.first_means import any_rank
from hubring.workers.reducer.groups import parameters_of
from hubring.workers.reducer.reducer import Reducer

_FIX = "remove cross_barrier=True, or let the hub step (without --aggregate)"


class BucketStepper:
    """Steps the parameters of one bucket at a time, with the same result as one `step()`.

    torch's own optimizers treat each parameter separately. So a step of one bucket runs the same
    kernels on the same tensors, bitwise. The optimizer still owns its state.

    Raises:
        ConfigError: The optimizer is not one of torch's, or it combines parameters (LBFGS).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        if getattr(torch.optim, kind.__name__, None) is not kind or kind is torch.optim.LBFGS:
            raise ConfigError(
                f"cross_barrier=True steps one bucket at a time, and {kind.__module__}.{kind.__qualname__}"
                f" may need all parameters at once: use a torch.optim optimizer other than LBFGS, or {_FIX}"
            )
        self._optimizer = optimizer

    def prepare(self) -> Callable[[Bucket], None]:
        """Returns a function that steps one bucket with the current hyperparameters.

        Later changes by a scheduler do not affect the returned function.

        Raises:
            ConfigError: The wrapped optimizer has hooks on `step`.
        """
        wrapped = self._optimizer
        if has_step_hooks(wrapped):
            raise ConfigError(
                "the wrapped optimizer has hooks on step(), which cross_barrier=True splits into buckets:"
                f" register the hooks on the DistributedOptimizer, or {_FIX}"
            )
        groups = [
            ({name: _copied(value) for name, value in group.items()}, set(group["params"]))
            for group in wrapped.param_groups
        ]

        def step(bucket: Bucket) -> None:
            with bucket.lent_gradients():
                for group, members in groups:
                    own = [one for one in bucket.parameters if one in members]
                    if own:
                        type(wrapped).step(self._part({**group, "params": own}))

        return step

    def _part(self, group: dict[str, Any]) -> Optimizer:
        """Returns the optimizer with one group only. It shares the state and everything else."""
        part = object.__new__(type(self._optimizer))
        vars(part).update(vars(self._optimizer))
        part.param_groups = [group]
        # Hooks on `step` must run once per full step.
        drop_step_hooks(part)
        return part


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def must_skip(optimizer: Optimizer, reducer: Reducer, timeout: float | None) -> bool:
    """Whether a GradScaler's step must be skipped; otherwise unscales the gradients, in place.

    If one rank found an infinity, all ranks skip. Where workers step, gradients are already means, so every
    rank finds the same. Ranks that are not in lockstep skip independently.

    Args:
        optimizer: Has what the scaler has set: `found_inf`, and `grad_scale` if it has not unscaled.
        reducer: Exchanges the gradients.
        timeout: Seconds to wait for the other ranks.

    Raises:
        ConfigError: Fewer passes have run than a step needs.
    """
    communicator = reducer.communicator
    if not reducer.on_server and not reducer.exchange.complete:
        raise ConfigError(
            f"step() was called after {reducer.passes.count} backward pass(es), fewer than"
            " backward_passes_per_step: with a GradScaler, run all passes before every step(), or"
            " call optimizer.synchronize() before scaler.step(optimizer)"
        )
    overflows = bool(optimizer.found_inf.item())  # type: ignore[attr-defined]
    if reducer.on_server and communicator.size > 1 and communicator.lockstep:
        overflows = any_rank(communicator, "scaler.found_inf", overflows, timeout)
    if overflows:
        return True
    scale: Tensor | None = vars(optimizer).get("grad_scale")
    if scale is not None:
        inverse = scale.double().reciprocal().float().item()
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.detach().mul_(inverse)
    return False


def habit(optimizer: Optimizer, reducer: Reducer, *, runs_code: bool) -> str:
    """Returns why gradients must wait for `step()`, apart from changes to them; empty if nothing."""
    if "found_inf" in vars(optimizer):
        return "uses a GradScaler"
    if reducer.overlap.backward is None and runs_code:
        return "runs code of its own before the wrapped optimizer's step()"
    if reducer.overlap.backward is None and reducer.passes.count > reducer.passes.per_step:
        return "runs backward more often than backward_passes_per_step"
    return ""


def weight_of(optimizer: Any) -> float | None:
    """What this rank's gradients count in the mean: how many samples or tokens they are a mean of.

    The mean is the sum of the ranks' gradients times their weights, divided by the sum of the weights. Set it
    on all ranks, before the backward whose gradients are sent; it stays until it is set again. None: all
    ranks count equally. A rank in `join()` has the weight 0. On an asynchronous hub it changes nothing, since
    each gradient is applied alone.

    Raises:
        ConfigError: It is not a finite number above 0, or this step's gradients were sent.
    """
    return optimizer._trained.reducer.exchange.weight  # type: ignore[no-any-return]


def weigh(optimizer: Any, weight: float | Tensor) -> None:
    """Sets `weight_of` an optimizer."""
    number, reducer = float(weight), optimizer._trained.reducer
    if not 0 < number < math.inf:
        raise ConfigError(
            f"optimizer.weight is {number:g}; it must be a finite number above 0, such as this rank's number"
            " of samples or tokens"
        )
    if reducer.awaits_step:
        raise ConfigError(
            "optimizer.weight was set after the gradients of this step were sent: set it before backward"
        )
    reducer.exchange.weight = number


class UnevenInputs:
    """Asks all ranks, and copies hyperparameters to ranks without a batch.

    Args:
        communicator: Its ranks must be in lockstep.
        optimizer: The optimizer whose numbers are copied, such as the learning rate.
    """

    def __init__(self, communicator: Communicator, optimizer: Optimizer) -> None:
        self._communicator = communicator
        self._optimizer = optimizer
        self._weight: float | None = None
        """This rank's while it has a batch."""

    def any_trains(self, reducer: Reducer, *, trains: bool) -> bool:
        """Whether some rank has a batch: before the hub steps, or after the mean where workers step.

        Args:
            reducer: Exchanges the gradients.
            trains: Whether this rank has one.

        Raises:
            ConfigError: The script uses a GradScaler.
            HubringError: See `allreduce`.
        """
        if "found_inf" in vars(self._optimizer):
            raise ConfigError(
                "uneven=True does not support GradScaler, because a rank in join() has no scaler:"
                " remove uneven=True or the GradScaler"
            )
        exchange = reducer.exchange
        self._weight = exchange.weight or self._weight
        if not trains and self._weight:
            exchange.weight = 0.0
        if not reducer.on_server:
            exchange.finish()
        groups = self._optimizer.param_groups  # load_state_dict replaces them
        places = [
            (group, name, own)
            for group in groups
            for name, value in group.items()
            if (own := as_number(value)) is not None
        ]
        sent = [own if trains else -math.inf for _, _, own in places]
        asked = torch.tensor([float(trains), *sent], dtype=torch.float64, device="cpu")
        some, *numbers = allreduce(
            asked, ReduceOp.MAX, "step.trains", communicator=self._communicator
        ).tolist()
        if not some:
            exchange.weight = self._weight
        elif not trains:
            for (group, name, own), number in zip(places, numbers, strict=True):
                if isinstance(group[name], Tensor):
                    group[name].fill_(number)
                elif number != own:  # a flag stays one
                    group[name] = number
        return bool(some)
