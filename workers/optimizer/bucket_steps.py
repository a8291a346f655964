"""A local optimizer's step, bucket by bucket: as soon as one's mean gradient is there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucketing import Bucket

_MEND = "leave out cross_barrier=True, or let the hub step (without --aggregate)"


class Stepper:
    """Steps parts of torch's own optimizers exactly as `step()` steps the whole.

    They treat every parameter by itself, so a step of a bucket's parameters is
    that part of the step: the same kernels on the same tensors, bitwise. State
    and its owner stay the optimizer's.

    Raises:
        ConfigError: The optimizer is not one of torch's, or looks at all parameters together.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        if getattr(torch.optim, kind.__name__, None) is not kind or kind is torch.optim.LBFGS:
            raise ConfigError(
                f"cross_barrier steps a few parameters at a time, and {kind.__module__}.{kind.__qualname__}"
                f" may look at all of them together: use one of torch.optim but LBFGS, or {_MEND}"
            )
        self._optimizer = optimizer

    def prepare(self) -> Callable[[Bucket], None]:
        """What steps one bucket with the hyperparameters of now, whatever a scheduler does meanwhile.

        Raises:
            ConfigError: Hooks wait for a step of the whole.
        """
        wrapped = self._optimizer
        if wrapped._optimizer_step_pre_hooks or wrapped._optimizer_step_post_hooks:
            raise ConfigError(
                "the wrapped optimizer has hooks on its step, which cross_barrier takes in parts: register"
                f" them on the DistributedOptimizer, or {_MEND}"
            )
        groups = [{name: _kept(value) for name, value in group.items()} for group in wrapped.param_groups]

        def step(bucket: Bucket) -> None:
            part = self._part({**groups[bucket.spec.group], "params": list(bucket.parameters)})
            with bucket.lent_gradients():
                type(wrapped).step(part)

        return step

    def _part(self, group: dict[str, Any]) -> Optimizer:
        """The optimizer with one group; all else, the state above all, is shared."""
        part = object.__new__(type(self._optimizer))
        vars(part).update(vars(self._optimizer))
        part.param_groups = [group]
        # A scheduler's or a hook's wrapping of `step` is for the whole.
        part._optimizer_step_pre_hooks = OrderedDict()
        part._optimizer_step_post_hooks = OrderedDict()
        return part


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
