"""Refuses parameters that a script converts too late."""

from __future__ import annotations

from torch import Tensor

from hubring.ps.core.errors import ConfigError


def check_unconverted(name: str, now: Tensor, then: Tensor) -> None:
    """Checks that a tensor still has its shape, dtype and device.

    Args:
        name: The tensor's name in the error.
        now: The tensor.
        then: Any tensor with the shape, dtype and device that it had in the constructor.

    Raises:
        ConfigError: It does not.
    """
    if (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
        raise ConfigError(
            f"{name} was moved or converted after DistributedOptimizer was made: it is {_described(now)}, and"
            f" was {_described(then)}; call model.to(...), .half(), .double() and similar methods before you"
            " make DistributedOptimizer"
        )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
