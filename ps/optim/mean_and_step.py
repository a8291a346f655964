"""torch's optimizers on the hub: by name, on flat slices, with numbers that travel.

An optimizer is chosen by name from ALLOWED; nothing is ever unpickled. Its
hyperparameters come with every push, so a schedule made on a worker acts here.

All five work element by element, so a slice's update is that of the tensor it
was cut from. It is so bitwise where torch's own runs the same kernel (fused,
and slices start at multiples of 64 bytes, as `hubring.ps.job.sharding` cuts them); against
torch's unfused loop it differs by a few units in the last place, since the
fused kernels contract a multiplication and an addition into one rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Hyper
from hubring.ps.optim.fused import KERNELS
from hubring.ps.optim.fused_mean_step import OnePass, one_pass
from hubring.ps.optim.hyperparameters import check_name, kwargs_of
from hubring.ps.optim.sums import finite_sum, fits_loops, summed

_CPU = torch.device("cpu")
_FULL = frozenset({torch.float32, torch.float64})
_FUSED: Mapping[str, frozenset[torch.dtype]] = {
    # Of half-precision tensors torch 2.13's fused SGD updates the last few elements only (pytorch#191763).
    "SGD": _FULL,
    "Adam": _FULL | {torch.float16, torch.bfloat16},
    "AdamW": _FULL | {torch.float16, torch.bfloat16},
    "Adagrad": _FULL | {torch.float16, torch.bfloat16},
}
"""Where one fused pass over memory replaces torch's loop: 3 to 10 times as fast on a 4 MiB slice."""


class SliceStep(Protocol):
    """What turns a round's gradient into a slice's next values."""

    def check(self, hyper: Hyper) -> None:
        """Refuses what `step` could not use.

        Raises:
            ConfigError: Says what, and the mend.
        """

    def step(
        self, values: Tensor, gradients: Sequence[Tensor], count: int, hyper: Hyper, scratch: Tensor
    ) -> None:
        """Updates `values` in place by the mean of `count` gradients.

        Args:
            values: Flat.
            gradients: These gradients; or their sum alone, if it lies in `scratch`. Not kept, and only read.
            count: At least one.
            hyper: For this step.
            scratch: At least as long as the values, and of their dtype; overwritten.

        Raises:
            NonFinite: Their sum is NaN or infinite somewhere, and was to be refused. It has not come into
                values and state, but other elements may have stepped, so they are of no step any more.
        """

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the values: the tensors themselves, not copies."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from such a state; it belongs to the optimizer from then on."""


class FusedStep:
    """One slice's optimizer, in one pass over memory where that can be, else by torch's fused kernel."""

    def __init__(self, name: str, *, finite: bool = False) -> None:
        self._name = name
        self._finite = finite
        self._sum = finite_sum if finite else summed
        self._kernel = KERNELS[name]
        self._state: dict[str, Tensor] = {}
        self._hyper: Hyper | None = None
        self._options: dict[str, Any] = {}
        self._divisors: dict[int, Tensor | None] = {1: None}
        self._made: dict[int, OnePass | None] = {}
        """By how many gradients are given, what steps with them under these hyperparameters."""

    def check(self, hyper: Hyper) -> None:
        if hyper != self._hyper:
            self._options = kwargs_of(hyper, self._name)
            self._hyper = hyper
            self._made.clear()

    def step(
        self, values: Tensor, gradients: Sequence[Tensor], count: int, hyper: Hyper, scratch: Tensor
    ) -> None:
        self.check(hyper)
        made = self._one_pass(len(gradients)) if fits_loops(values) else None
        if made is not None and made.goes_on_from(values, self._state):
            elements = made(values, gradients, count, self._state, self._options)
            if self._finite and not isfinite(elements):
                finite_sum(gradients, scratch)  # raises, but where elements are beyond float32 only together
            return
        if count not in self._divisors:
            self._divisors[count] = torch.tensor(float(count), device=values.device)
        # The kernel divides on its way, which spares a pass over memory: 10 % of a round.
        total = self._sum(gradients, scratch)
        self._kernel(values, total, self._state, self._options, self._divisors[count])

    def _one_pass(self, gradients: int) -> OnePass | None:
        if gradients not in self._made:
            self._made[gradients] = one_pass(self._name, gradients, self._options, finite=self._finite)
        return self._made[gradients]

    def state(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)


class SliceOptimizer:
    """One slice's torch optimizer.

    `values` must be the same tensor in every step, since it is the parameter.
    """

    def __init__(self, name: str, *, finite: bool = False) -> None:
        self._name = name
        self._sum = finite_sum if finite else summed
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

    def step(
        self, values: Tensor, gradients: Sequence[Tensor], count: int, hyper: Hyper, scratch: Tensor
    ) -> None:
        if self._optimizer is None:
            self._optimizer = self._build(values, hyper)
        if hyper != self._hyper:
            self._optimizer.param_groups[0].update(kwargs_of(hyper, self._name))
            self._hyper = hyper
        total = self._sum(gradients, scratch)
        values.grad = total if count == 1 else total.div_(count)
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
    """Makes the mean the values: the hub averages, the worker steps."""

    def check(self, hyper: Hyper) -> None:
        """Takes anything: nothing is used."""

    def step(
        self, values: Tensor, gradients: Sequence[Tensor], count: int, hyper: Hyper, scratch: Tensor
    ) -> None:
        torch.div(summed(gradients, scratch), count, out=values)

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Keeps nothing: there is no state."""


def optimizer_for(
    name: str, dtype: torch.dtype, device: torch.device = _CPU, *, finite: bool = False
) -> SliceStep:
    """What steps a slice of a bucket with this `BucketSpec.optimizer` and dtype on this device.

    With `finite` it refuses gradients that are not, but where the workers step: a mean is theirs to judge.

    Raises:
        ConfigError: The hub does not run it, or not there.
    """
    if not name:
        return Assign()
    check_name(name)
    if name in KERNELS and dtype in _FUSED[name]:
        return FusedStep(name, finite=finite)
    if device.type != "cpu":
        raise ConfigError(
            f"the hub runs no {name} of {dtype} on {device}, only {', '.join(KERNELS)} (SGD in full"
            " precision): use one of these, or start the server with --device cpu, or the workers with"
            " --aggregate"
        )
    return SliceOptimizer(name, finite=finite)
