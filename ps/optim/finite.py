"""Checks tensors for NaN and infinity."""

from __future__ import annotations

from math import isfinite

from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Returns whether no element is NaN or infinite.

    A sum with such an element is never finite, so one reduction is enough and needs no memory of the
    tensor's size. Only if the sum is not finite, each element is checked: a sum of finite elements can
    overflow.
    """
    return isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())
