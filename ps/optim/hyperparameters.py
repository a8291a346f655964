"""An optimizer's hyperparameters as numbers, which every push contains."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from hubring.ps.core.errors import ConfigError, HubCannotStep
from hubring.ps.core.types import Hyper

_TRAVELS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    "Adagrad": ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
}
"""The options of a parameter group that change the result of a step.

Other options choose among implementations of the same step (foreach, fused), which
the hub does by itself, or belong to the script (a scheduler's initial_lr).
"""

ALLOWED = tuple(_TRAVELS)
"""Names of the torch.optim classes that the hub supports."""

STATE: Mapping[str, tuple[str, ...]] = {
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adagrad": ("step", "sum"),
    "RMSprop": ("step", "square_avg"),
}
"""The tensors that the state of every stepped parameter has; SGD's has none without momentum."""

OPTIONAL_STATE: Mapping[str, Mapping[str, str]] = {
    "RMSprop": {"momentum": "momentum_buffer", "centered": "grad_avg"}
}
"""The tensors that a parameter's state has only if its first step had an option, by the option."""

_FLAGS = frozenset({"nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay"})
_SHARES = frozenset({"beta1", "beta2"})
_REFUSED = ("differentiable", "capturable")


def hyper_of(param_group: Mapping[str, Any], name: str) -> Hyper:
    """Returns a parameter group's hyperparameters as numbers; `betas` become beta1 and beta2.

    Args:
        param_group: One of `optimizer.param_groups`.
        name: The optimizer's class name.

    Raises:
        HubCannotStep: The hub does not support this optimizer or an option.
    """
    if name not in _TRAVELS:
        check_name(name)
    for option in _REFUSED:
        if param_group.get(option):
            raise HubCannotStep(f"the hub does not support {name}({option}=True)")
    hyper: dict[str, float] = {}
    for option in _TRAVELS[name]:
        value = param_group[option]
        if option == "betas":
            hyper["beta1"], hyper["beta2"] = _number(name, option, value[0]), _number(name, option, value[1])
        elif isinstance(value, (float, int)):  # most are, in every step; a bool becomes 0 or 1
            hyper[option] = float(value)
        else:
            hyper[option] = _number(name, option, value)
    return hyper


def kwargs_of(hyper: Hyper, name: str) -> dict[str, Any]:
    """Converts numbers from `hyper_of` back to torch.optim's options.

    Raises:
        ConfigError: The names do not match this optimizer, or a number is invalid.
    """
    check_name(name)
    options = set(_TRAVELS[name])
    expected = options - {"betas"} | {"beta1", "beta2"} if "betas" in options else options
    if hyper.keys() != expected:
        raise ConfigError(
            f"{name} got the hyperparameters {sorted(hyper)}, expected {sorted(expected)};"
            " install the same version of Hubring on workers and server"
        )
    for option, value in hyper.items():
        if not isfinite(value):
            raise ConfigError(
                f"{name} got {option}={value}, expected a finite number; check the learning rate schedule"
            )
        if option in _SHARES and not 0 <= value < 1:
            raise ConfigError(f"{name} got {option}={value}; it must be at least 0 and less than 1")
    kwargs: dict[str, Any] = {
        option: bool(hyper[option]) if option in _FLAGS else hyper[option] for option in hyper
    }
    if "beta1" in kwargs:
        kwargs["betas"] = (kwargs.pop("beta1"), kwargs.pop("beta2"))
    return kwargs


def check_name(name: str) -> None:
    """Checks that the hub supports this optimizer.

    Raises:
        HubCannotStep: The hub does not support it.
    """
    if name not in _TRAVELS:
        raise HubCannotStep(
            f"the hub does not support the optimizer {name}, only {', '.join(ALLOWED)} of torch.optim"
        )


def _number(name: str, option: str, value: object) -> float:
    """Returns a number; a bool becomes 0 or 1, a tensor its single element."""
    number = as_number(value)
    if number is None:
        raise HubCannotStep(f"the hub does not support {name}({option}={value!r}): it is no number")
    return number


def as_number(value: Any) -> float | None:
    """Returns what torch's optimizers take as a number: also NumPy's numbers, and single elements.

    A bool becomes 0 or 1. Anything else is None.
    """
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):  # complex, or several elements
        return None
