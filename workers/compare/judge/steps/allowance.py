"""How far a value can be from the reference's by rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from hubring.workers.audit.audit_file import ModelLayout

DOUBT = 32.0
"""How often the measured effect of rounded gradients is allowed. One draw of signs shows only part of it."""

ULPS = 2.0
"""Allowed units in the last place of a parameter, in one step. A hub may fuse or reorder two roundings."""


def precision(layout: ModelLayout, parameter_of: Tensor) -> Tensor:
    """Returns the relative rounding error of each element's dtype, which is at least that of the record."""
    record = torch.finfo(torch.float64 if layout.wide else torch.float32).eps
    eps = [max(record, torch.finfo(getattr(torch, each)).eps) for each in layout.dtypes]
    return torch.tensor(eps, dtype=torch.float64)[parameter_of]


def of_mean(eps: Tensor, gradients: Tensor) -> Tensor:
    """Returns how far the mean of gradients can be off, by element.

    Args:
        eps: The result of `precision`.
        gradients: All ranks' gradients: [ranks, elements].
    """
    return (4 + 2 * len(gradients)) * eps * gradients.abs().amax(0)


def of_update(update: Tensor, doubt: Tensor, parameter_of: Tensor, tolerance: float) -> Tensor:
    """Returns how far an update can be off, by element, without the rounding of the parameter itself.

    Args:
        update: What the reference adds to the parameters.
        doubt: How far rounding of the gradients can move them.
        parameter_of: The parameter of each element.
        tolerance: Allowed difference, relative to the update's root mean square over its parameter.
    """
    return tolerance * _size_of(update, parameter_of) + DOUBT * doubt


def of_storing(eps: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Returns how far a parameter can be off because a step rounds it, by element."""
    return ULPS * (eps * torch.maximum(before.abs(), after.abs()))


def _size_of(update: Tensor, parameter_of: Tensor) -> Tensor:
    """Returns the root mean square of each element's parameter."""
    count = int(parameter_of.max()) + 1 if len(parameter_of) else 0
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, parameter_of, update.square())
    numbers = torch.bincount(parameter_of, minlength=count).clamp(min=1)
    return (sums / numbers).sqrt()[parameter_of]
