"""torch's optimizers on the hub: by name, on flat slices, with numbers that travel.

An optimizer is chosen by name from ALLOWED; nothing is ever unpickled. Its
hyperparameters come with every push, so a schedule made on a worker acts here.

All five work element by element, so a slice's update is that of the tensor it
was cut from. It is so bitwise where torch's own runs the same kernel (fused,
and slices start at multiples of 64 bytes, as `ps.sharding` cuts them); against
torch's unfused loop it differs by a few units in the last place, since the
fused kernels contract a multiplication and an addition into one rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from ps.errors import ConfigError
from ps.fused import KERNELS
from ps.types import Hyper

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

_CPU = torch.device("cpu")
_FLAGS = frozenset({"nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay"})
_REFUSED = ("differentiable", "capturable")
_FULL = frozenset({torch.float32, torch.float64})
_FUSED: Mapping[str, frozenset[torch.dtype]] = {
    # Of half-precision tensors torch 2.13's fused SGD updates the last few elements only (pytorch#191763).
    "SGD": _FULL,
    "Adam": _FULL | {torch.float16, torch.bfloat16},
    "AdamW": _FULL | {torch.float16, torch.bfloat16},
    "Adagrad": _FULL | {torch.float16, torch.bfloat16},
}
"""Where one fused pass over memory replaces torch's loop: 3 to 10 times as fast on a 4 MiB slice."""


def hyper_of(param_group: Mapping[str, Any], name: str) -> Hyper:
    """A parameter group's hyperparameters as numbers; `betas` become beta1 and beta2.

    Args:
        param_group: One of `optimizer.param_groups`.
        name: The optimizer's class name.

    Raises:
        ConfigError: The hub does not run this optimizer, or an option has no meaning there.
    """
    _check_name(name)
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
        ConfigError: The names are not this optimizer's, or a number is not finite.
    """
    _check_name(name)
    expected = _names(name)
    if hyper.keys() != expected:
        raise ConfigError(
            f"{name} came with the hyperparameters {sorted(hyper)}, it takes {sorted(expected)}:"
            " start workers and server from the same version"
        )
    for option, value in hyper.items():
        if not isfinite(value):
            raise ConfigError(f"{name} came with {option}={value}; look at the learning rate's schedule")
    kwargs: dict[str, Any] = {
        option: bool(hyper[option]) if option in _FLAGS else hyper[option] for option in hyper
    }
    if "beta1" in kwargs:
        kwargs["betas"] = (kwargs.pop("beta1"), kwargs.pop("beta2"))
    return kwargs


class SliceStep(Protocol):
    """What turns a round's gradient into a slice's next values."""

    def check(self, hyper: Hyper) -> None:
        """Refuses what `step` could not use.

        Raises:
            ConfigError: Says what, and the mend.
        """

    def step(self, values: Tensor, gradient: Tensor, count: int, hyper: Hyper) -> None:
        """Updates `values` in place by the mean of `count` gradients.

        `gradient` is their sum, which may be overwritten; the sum of one is only read. It is not kept.
        """

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the values: the tensors themselves, not copies."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from such a state; it belongs to the optimizer from then on."""


class FusedStep:
    """One slice's optimizer, run by torch's fused kernel."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kernel = KERNELS[name]
        self._state: dict[str, Tensor] = {}
        self._hyper: Hyper | None = None
        self._options: dict[str, Any] = {}
        self._divisors: dict[int, Tensor | None] = {1: None}

    def check(self, hyper: Hyper) -> None:
        if hyper != self._hyper:
            self._options = kwargs_of(hyper, self._name)
            self._hyper = hyper

    def step(self, values: Tensor, gradient: Tensor, count: int, hyper: Hyper) -> None:
        self.check(hyper)
        if count not in self._divisors:
            self._divisors[count] = torch.tensor(float(count), device=values.device)
        # The kernel divides on its way, which spares a pass over memory: 10 % of a round.
        self._kernel(values, gradient, self._state, self._options, self._divisors[count])

    def state(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)


class SliceOptimizer:
    """One slice's torch optimizer.

    `values` must be the same tensor in every step, since it is the parameter.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
        # A process's first optimizer makes torch load its compiler, for a second: now, not in a push.
        self._kind([torch.zeros(1)])
        self._optimizer: torch.optim.Optimizer | None = None
        self._loaded: dict[str, Tensor] = {}
        self._hyper: Hyper | None = None
        self._checked: Hyper | None = None

    def check(self, hyper: Hyper) -> None:
        if hyper != self._checked:
            kwargs_of(hyper, self._name)
            self._checked = hyper

    def step(self, values: Tensor, gradient: Tensor, count: int, hyper: Hyper) -> None:
        if self._optimizer is None:
            self._optimizer = self._build(values, hyper)
        if hyper != self._hyper:
            self._optimizer.param_groups[0].update(kwargs_of(hyper, self._name))
            self._hyper = hyper
        values.grad = gradient if count == 1 else gradient.div_(count)
        self._optimizer.step()
        values.grad = None

    def state(self) -> dict[str, Tensor]:
        if self._optimizer is None:
            return dict(self._loaded)
        (values,) = self._optimizer.param_groups[0]["params"]
        state = self._optimizer.state[values]
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._loaded = dict(state)
        self._optimizer = None

    def _build(self, values: Tensor, hyper: Hyper) -> torch.optim.Optimizer:
        # The options are put into the group by `step`, but for the one that shapes the first state.
        options: dict[str, Any] = (
            {"fused": True} if values.dtype in _FUSED.get(self._name, ()) else {"foreach": False}
        )
        if "initial_accumulator_value" in hyper:
            options["initial_accumulator_value"] = hyper["initial_accumulator_value"]
        optimizer = self._kind([values], **options)
        if self._loaded:
            optimizer.state[values] = self._loaded
            self._loaded = {}
        return optimizer


class Assign:
    """Makes the gradient the values: the hub averages, the worker steps."""

    def check(self, hyper: Hyper) -> None:
        """Takes anything: nothing is used."""

    def step(self, values: Tensor, gradient: Tensor, count: int, hyper: Hyper) -> None:
        torch.div(gradient, count, out=values)

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Keeps nothing: there is no state."""


def optimizer_for(name: str, dtype: torch.dtype, device: torch.device = _CPU) -> SliceStep:
    """What steps a slice of a bucket with this `BucketSpec.optimizer` and dtype on this device.

    Raises:
        ConfigError: The hub does not run it, or not there.
    """
    if not name:
        return Assign()
    _check_name(name)
    if name in KERNELS and dtype in _FUSED[name]:
        return FusedStep(name)
    if device.type != "cpu":
        raise ConfigError(
            f"the hub runs no {name} of {dtype} on {device}, only {', '.join(KERNELS)} (SGD in full"
            " precision): use one of these, or start the server with --device cpu, or the workers with"
            " --aggregate"
        )
    return SliceOptimizer(name)


def _check_name(name: str) -> None:
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
