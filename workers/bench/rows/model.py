"""A model in flat memory, as in a hand-optimized script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor, nn

from hubring.ps.core.types import Hyper
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.bench.shapes import Dims

OPTIMIZERS = ("sgd", "adam")
"""SGD with momentum 0.9, and Adam; torch's own, fused."""


class FlatModel:
    """Parameters of zeros, float32, with gradients.

    Attributes:
        values: Flat tensor; every parameter is a view of it.
        gradients: Flat tensor; every `parameter.grad` is a view of it.
        parameters: The parameters.
        value_parts: The parameters as flat views.
        gradient_parts: The gradients as flat views.
    """

    def __init__(self, tensors: Sequence[Dims]) -> None:
        numels = [prod(dims) for dims in tensors]
        self.values, self.gradients = torch.zeros(sum(numels)), torch.zeros(sum(numels))
        self.value_parts = torch.split(self.values, numels)
        self.gradient_parts = torch.split(self.gradients, numels)
        self.parameters = [nn.Parameter(view) for view in views(self.values, tensors)]
        for parameter, view in zip(self.parameters, views(self.gradients, tensors), strict=True):
            parameter.grad = view


class Bucket:
    """A part of a flat model, which is stepped alone when its gradients have arrived.

    The fused step's `grad_scale` divides the sum by the number of ranks, which saves a pass over the
    gradients.

    Args:
        optimizer: A name from `OPTIMIZERS`.
        values: Flat tensor; stepped in place.
        gradients: Flat tensor; holds the sum over the ranks at each step.
        size: Number of ranks.
    """

    def __init__(self, optimizer: str, values: Tensor, gradients: Tensor, size: int) -> None:
        self.values, self.gradients = values, gradients
        self._parameter = nn.Parameter(values)
        self._optimizer = optimizer_of(optimizer, [self._parameter])
        if size > 1:
            # The attribute of GradScaler, by which the fused kernels divide.
            self._optimizer.grad_scale = torch.tensor(float(size))  # type: ignore[attr-defined]

    def step(self) -> None:
        """Steps with the mean."""
        self._parameter.grad = self.gradients
        self._optimizer.step()


def views(flat: Tensor, tensors: Sequence[Dims]) -> list[Tensor]:
    """Returns the tensors of a model as consecutive views of `flat`."""
    parts = torch.split(flat, [prod(dims) for dims in tensors])
    return [part.view(dims) for part, dims in zip(parts, tensors, strict=True)]


def optimizer_of(name: str, parameters: Iterable[nn.Parameter], scale: float = 1.0) -> torch.optim.Optimizer:
    """Returns one of `OPTIMIZERS` for these parameters; `scale` multiplies the learning rate."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01 * scale, fused=True)
    return torch.optim.SGD(parameters, lr=0.1 * scale, momentum=0.9, fused=True)


def on_server(name: str) -> tuple[str, Hyper]:
    """Returns the name of torch's optimizer and its hyperparameters, for a server."""
    optimizer = optimizer_of(name, [nn.Parameter(torch.empty(0))])
    kind = type(optimizer).__name__
    return kind, hyper_of(optimizer.param_groups[0], kind)
