"""A model laid out flat, as a script that knows its trade would do it by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor, nn

from workers.bench.shapes import Dims

OPTIMIZERS = ("sgd", "adam")
"""SGD with momentum 0.9, and Adam; torch's own, fused."""


class FlatModel:
    """Parameters of zeros, float32, with gradients.

    Attributes:
        values: Flat; every parameter is a view of it.
        gradients: Flat; every `parameter.grad` is a view of it.
        parameters: What a model would hold.
        value_parts: The same as flat views, one a parameter.
        gradient_parts: Their gradients, likewise.
    """

    def __init__(self, tensors: Sequence[Dims]) -> None:
        numels = [prod(dims) for dims in tensors]
        self.values, self.gradients = torch.zeros(sum(numels)), torch.zeros(sum(numels))
        self.value_parts = torch.split(self.values, numels)
        self.gradient_parts = torch.split(self.gradients, numels)
        self.parameters = [nn.Parameter(view) for view in views(self.values, tensors)]
        for parameter, view in zip(self.parameters, views(self.gradients, tensors), strict=True):
            parameter.grad = view


def views(flat: Tensor, tensors: Sequence[Dims]) -> list[Tensor]:
    """The tensors of a model, one after the other in `flat`."""
    parts = torch.split(flat, [prod(dims) for dims in tensors])
    return [part.view(dims) for part, dims in zip(parts, tensors, strict=True)]


def optimizer_of(name: str, parameters: Iterable[nn.Parameter], scale: float = 1.0) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS` over these parameters; `scale` is of its learning rate."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01 * scale, fused=True)
    return torch.optim.SGD(parameters, lr=0.1 * scale, momentum=0.9, fused=True)
