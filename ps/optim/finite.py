"""Whether a tensor holds numbers alone."""

from __future__ import annotations

from math import isfinite

from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    A sum over one that is can never be finite, so one reduction tells, and makes nothing of the tensor's
    size. Only where the sum overflows though none of its terms is infinite, each is looked at.
    """
    return isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())
