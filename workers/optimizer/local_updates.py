"""Workers that step alone, and merge what they have learned now and then.

Each worker's own optimizer takes `every` steps. How far it then is from where all began counts as a gradient,
with whose mean over the workers an outer optimizer steps. All go on from its result.

    outer optimizer                             the rule
    SGD(lr=1)                                   local SGD: the parameters' mean (Stich, ICLR 2019)
    SGD(lr=0.7, momentum=0.9, nesterov=True)    DiLoCo (Douillard et al., 2023)
    either, with every=1 at first               post-local SGD (Lin et al., ICLR 2020)
    either, on an asynchronous hub              each worker is merged when it comes (Liu et al., 2024)

The exchange is that of a `DistributedOptimizer` over a second copy of the model, so it has the same
topologies, modes, codecs, weights, standbys and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.optimizer.wrapping import OptimizerWrapper
from hubring.workers.reducer.groups import parameters_of

Outer = Callable[[list[Parameter]], Optimizer]
"""Makes the outer optimizer of these parameters."""
MEAN: Outer = partial(torch.optim.SGD, lr=1.0)
"""Makes the result the mean of the workers' parameters."""


class LocalOptimizer(OptimizerWrapper):
    """Steps the model on this worker alone, and merges it with those of the others after `every` steps.

    Schedulers, `GradScaler`, closures and `state_dict` are those of the wrapped optimizer, whose state stays
    on this worker. A checkpoint has the merged parameters and the outer optimizer's state; a script that also
    wants the wrapped optimizer's saves it.

    Attributes:
        outer: The optimizer that merges. Its `completed_steps` are the merges.
        completed_steps: Steps of this worker, including those before a restart.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: Module,
        *,
        every: int | Callable[[int], int],
        outer: Outer = MEAN,
        communicator: Communicator | None = None,
        bucket_bytes: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Copies rank 0's model to all ranks.

        Args:
            optimizer: Steps this worker's model.
            model: The model, on its device, with its dtype and weights.
            every: Steps between two merges, equal on all ranks; or returns them from the merges so far.
            outer: Makes the outer optimizer of the parameters that it gets. A hub that steps has SGD, Adam,
                AdamW, Adagrad and RMSprop.
            communicator: See `DistributedOptimizer`.
            bucket_bytes: See `DistributedOptimizer`.
            timeout: See `DistributedOptimizer`.

        Raises:
            ConfigError: `every` is no whole number of at least 1, the optimizer has parameters that the model
                does not have, or as from `DistributedOptimizer`.
        """
        super().__init__(optimizer, model)
        self._model, self._every = model, every
        names = {parameter: name for name, parameter in model.named_parameters()}
        own = parameters_of(optimizer)
        if len(own) != len(names.keys() & set(own)):
            raise ConfigError("the optimizer has parameters that are not the model's: use model.parameters()")
        self._merged = deepcopy(model)
        twins = dict(self._merged.named_parameters())
        self._pairs = [(parameter, twins[names[parameter]]) for parameter in own]
        self.outer = DistributedOptimizer(
            outer([twin for _, twin in self._pairs]),
            self._merged,
            communicator=communicator,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
        )
        self.completed_steps = sum(map(self._steps_after, range(self.outer.completed_steps)))
        self._take_over()

    @property
    def weight(self) -> float | None:
        """What this worker counts in the next merge; see `DistributedOptimizer.weight`."""
        weight: float | None = self.outer.weight
        return weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.outer.weight = weight

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step on this worker, and merges if it is time; all ranks take equally many.

        Args:
            closure: As for the wrapped optimizer.

        Raises:
            HubringError: As `DistributedOptimizer.step`.
        """
        loss = self.step_wrapped(*filter(None, [closure]))
        self.after_wrapped()
        return loss

    def after_wrapped(self) -> None:
        self.completed_steps += 1
        if self.completed_steps == self._merges_at:
            self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Merges now, unless no step was taken since the last merge. Every rank calls it after the last step.

        Raises:
            ConfigError: The optimizer got other parameters.
            HubringError: As `DistributedOptimizer.step`.
        """
        if self.completed_steps == self._merged_at:
            return  # the outer optimizer's momentum would go on
        if list(map(id, parameters_of(self))) != [id(own) for own, _ in self._pairs]:
            raise ConfigError("the optimizer got other parameters: make a new LocalOptimizer of it")
        for own, merged in self._pairs:
            merged.grad = merged - own
        for buffer, kept in zip(self._model.buffers(), self._merged.buffers(), strict=True):
            kept.copy_(buffer)  # for a checkpoint
        self.outer.step()
        self.outer.zero_grad()
        self._take_over()

    def refresh(self) -> None:
        """Drops the steps since the last merge, and gets an asynchronous hub's newest parameters."""
        self.outer.refresh()
        self._take_over()

    def _take_over(self) -> None:
        """Goes on from the merged model."""
        self._model.load_state_dict(self._merged.state_dict())
        self._merged_at = self.completed_steps
        self._merges_at = self._merged_at + self._steps_after(self.outer.completed_steps)

    def _steps_after(self, merges: int) -> int:
        steps = self._every(merges) if callable(self._every) else self._every
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"every is {steps} after {merges} merges; pass a whole number of at least 1")
        return steps
