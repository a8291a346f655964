"""An optimizer's hyperparameters as numbers, which travel with every push."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Hyper

_TRAVELS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    "Adagrad": ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
}
"""The options in a parameter group that change what a step computes.

The others choose among implementations of the same step (foreach, fused), which
is the hub's own affair, or belong to the script (a scheduler's initial_lr).
"""

ALLOWED = tuple(_TRAVELS)
"""Names of torch.optim classes that the hub can run."""

_FLAGS = frozenset({"nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay"})
_SHARES = frozenset({"beta1", "beta2"})
_REFUSED = ("differentiable", "capturable")


def hyper_of(param_group: Mapping[str, Any], name: str) -> Hyper:
    """A parameter group's hyperparameters as numbers; `betas` become beta1 and beta2.

    Args:
        param_group: One of `optimizer.param_groups`.
        name: The optimizer's class name.

    Raises:
        ConfigError: The hub does not run this optimizer, or an option has no meaning there.
    """
    check_name(name)
    for option in _REFUSED:
        if param_group.get(option):
            raise ConfigError(f"{name}({option}=True) cannot run on the hub: leave {option} out")
    hyper: dict[str, float] = {}
    for option in _TRAVELS[name]:
        value = param_group[option]
        if option == "betas":
            hyper["beta1"], hyper["beta2"] = (
                _number(name, "betas", value[0]),
                _number(name, "betas", value[1]),
            )
        else:
            hyper[option] = _number(name, option, value)
    return hyper


def kwargs_of(hyper: Hyper, name: str) -> dict[str, Any]:
    """What `hyper_of` made numbers of, as torch.optim spells it.

    Raises:
        ConfigError: The names are not this optimizer's, or a number is none that it could step with.
    """
    check_name(name)
    expected = _names(name)
    if hyper.keys() != expected:
        raise ConfigError(
            f"{name} came with the hyperparameters {sorted(hyper)}, it takes {sorted(expected)}:"
            " start workers and server from the same version"
        )
    for option, value in hyper.items():
        if not isfinite(value):
            raise ConfigError(f"{name} came with {option}={value}; look at the learning rate's schedule")
        if option in _SHARES and not 0 <= value < 1:
            raise ConfigError(f"{name} came with {option}={value}; it must be at least 0 and less than 1")
    kwargs: dict[str, Any] = {
        option: bool(hyper[option]) if option in _FLAGS else hyper[option] for option in hyper
    }
    if "beta1" in kwargs:
        kwargs["betas"] = (kwargs.pop("beta1"), kwargs.pop("beta2"))
    return kwargs


def check_name(name: str) -> None:
    """Makes sure that the hub runs this optimizer.

    Raises:
        ConfigError: It does not; lists those that it runs.
    """
    if name not in _TRAVELS:
        raise ConfigError(
            f"the hub cannot run {name}: use one of {', '.join(ALLOWED)}, or start the workers with"
            " --aggregate, where the hub averages and your own optimizer steps"
        )


def _names(name: str) -> set[str]:
    """What a Hyper for this optimizer consists of."""
    options = set(_TRAVELS[name])
    return options - {"betas"} | {"beta1", "beta2"} if "betas" in options else options


def _number(name: str, option: str, value: object) -> float:
    """A number, a bool as 0 or 1, a tensor's one element."""
    if not isinstance(value, (int, float, Tensor)):
        raise ConfigError(f"{name}({option}={value!r}) is not a number, so it cannot travel to the hub")
    return float(value)
