"""Runs a local optimizer's step bucket by bucket, as soon as a bucket's mean gradient has arrived."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket

_FIX = "remove cross_barrier=True, or let the hub step (without --aggregate)"


class Stepper:
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
        if wrapped._optimizer_step_pre_hooks or wrapped._optimizer_step_post_hooks:
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
        part._optimizer_step_pre_hooks = OrderedDict()
        part._optimizer_step_post_hooks = OrderedDict()
        return part


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
