"""Horovod's callbacks for Keras: `hvd.callbacks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import torch

from hubring.workers.horovod.basics import size
from hubring.workers.horovod.collectives.mpi_ops import allreduce
from hubring.workers.horovod.functions import broadcast_parameters
from hubring.workers.horovod.world import ProcessSet, global_process_set

__all__ = [
    *("BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback", "LearningRateWarmupCallback"),
    "MetricAverageCallback",
]


def variables_of(model: Any) -> list[Any]:
    """Returns a model's weights and its optimizer's variables; not metrics, nor states of random numbers."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(() if optimizer is None else optimizer.variables)]


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Overwrites Keras variables with the root's, which has them in the same order."""
    named = {f"{index:06}.{one.path}": one.value.detach() for index, one in enumerate(variables)}
    broadcast_parameters(named, root_rank)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copies the root's weights and optimizer variables to all ranks when `fit` begins.

    Args:
        root_rank: The rank whose variables are used.
        device: Without effect.
        local_variables: Variables that each rank keeps.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root, self._local = root_rank, {id(one) for one in local_variables or ()}

    def on_train_begin(self, logs: Any = None) -> None:
        shared = [one for one in variables_of(self.model) if id(one) not in self._local]
        broadcast_variables(shared, self._root)


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces each metric by its mean over all ranks at the end of an epoch, for the callbacks after it.

    Args:
        device: Without effect.
        process_set: The ranks that take part.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        own = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64, device="cpu")
        means = allreduce(own, name="MetricAverageCallback", process_set=self._process_set)
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)`.

    Args:
        initial_lr: The learning rate of the first epoch.
        multiplier: A function of the epoch; or a number, to be multiplied by once for each epoch.
        start_epoch: The first epoch that this callback changes.
        end_epoch: The first epoch that it leaves alone; None: never.
        staircase: Whether to change at the start of an epoch only, and not at each batch.
        momentum_correction: Whether the momentum of the first batch with another learning rate is scaled by
            the ratio of the two (Goyal et al., 2017).
        steps_per_epoch: Batches of an epoch; None: as many as `fit` knows of.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.staircase = staircase or not callable(multiplier)
        self.multiplier = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self.current_epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__}: fit does not know the batches of an epoch: pass steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        end = self.end_epoch
        if self.current_epoch < self.start_epoch or (end is not None and self.current_epoch >= end):
            return
        if self.staircase and batch == 0:
            self._set_rate(self.current_epoch)
        elif not self.staircase:
            self._set_rate(self.current_epoch + batch / (self.steps_per_epoch or 1))

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and getattr(optimizer, "momentum", None):
            self._momentum = optimizer.momentum
            optimizer.momentum = self._momentum * new / old

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr` in the first epochs.

    Args:
        initial_lr: The learning rate after the warmup.
        warmup_epochs: The epochs of the warmup.
        momentum_correction, steps_per_epoch: As for `LearningRateScheduleCallback`.
        verbose: Whether to print the learning rate at the end of the warmup.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            done = epoch + 1 / (self.steps_per_epoch or 1)  # so that an epoch ends on a round number
            return (done * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch + 1 == self.end_epoch:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
