"""torch's optimizers on the hub: chosen by name, applied to flat slices.

An optimizer is chosen by name from ALLOWED; the hub never unpickles anything. Every
push contains the hyperparameters, so schedules on the workers apply here.

All five optimizers work element by element, so the update of a slice equals that of
the whole tensor. It is bitwise equal to torch's fused kernel, because slices start at
multiples of 64 bytes (`hubring.ps.job.sharding`). It differs from torch's unfused loop
by a few units in the last place, because fused kernels round a multiplication and an
addition together.

`Optimizer.step` spends 30 to 60 us on groups, hooks and checks. torch's kernel takes 200 us for a slice of
4 MiB, and much less for a small slice. The state has torch's names, so that it is exchangeable with the
optimizer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim.rmsprop import rmsprop as torch_rmsprop

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.torch_internals import fused_adagrad, fused_adam, fused_adamw, fused_sgd
from hubring.ps.core.types import Hyper
from hubring.ps.optim.fused_mean_step import Divisor, Kernel, OnePass, Options, States, Tensors, one_pass
from hubring.ps.optim.hyperparameters import OPTIONAL_STATE, check_name, kwargs_of
from hubring.ps.optim.sums import finite_sum, fits_loops, summed, zeros_like


def sgd(values: Tensors, gradients: Tensors, states: States, options: Options, divisor: Divisor) -> None:
    """`torch.optim.SGD`'s step."""
    first, buffers = False, list[Tensor]()
    if options["momentum"] != 0:
        first = "momentum_buffer" not in states[0]
        if first:
            for one, state in zip(values, states, strict=True):
                state["momentum_buffer"] = zeros_like(one)
        buffers = [state["momentum_buffer"] for state in states]
    fused_sgd(values, gradients, buffers, **options, is_first_step=first, grad_scale=divisor)


def adam(values: Tensors, gradients: Tensors, states: States, options: Options, divisor: Divisor) -> None:
    """The step of `torch.optim.Adam` and `AdamW`, which differ in one option."""
    for one, state in zip(values, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=one.device)
            state["exp_avg"], state["exp_avg_sq"] = zeros_like(one), zeros_like(one)
        if options["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = zeros_like(one)
        state["step"] += 1
    kernel = fused_adamw if options["decoupled_weight_decay"] else fused_adam
    kernel(
        values,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if options["amsgrad"] else [],
        [state["step"] for state in states],
        lr=options["lr"],
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        amsgrad=options["amsgrad"],
        maximize=options["maximize"],
        grad_scale=divisor,
    )


def adagrad(values: Tensors, gradients: Tensors, states: States, options: Options, divisor: Divisor) -> None:
    """`torch.optim.Adagrad`'s step."""
    own = dict(options)
    first = own.pop("initial_accumulator_value")
    for one, state in zip(values, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["sum"] = torch.full_like(one, first)
        state["step"] += 1
    sums, steps = [state["sum"] for state in states], [state["step"] for state in states]
    fused_adagrad(values, _means(gradients, divisor), sums, steps, **own)


def rmsprop(values: Tensors, gradients: Tensors, states: States, options: Options, divisor: Divisor) -> None:
    """`torch.optim.RMSprop`'s step, which has no fused kernel."""
    optional = [tensor for option, tensor in OPTIONAL_STATE["RMSprop"].items() if options[option]]
    for one, state in zip(values, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state.update({name: torch.zeros_like(one) for name in ("square_avg", *optional)})
    squares, averages, buffers, steps = (
        [state[name] for state in states if name in state]
        for name in ("square_avg", "grad_avg", "momentum_buffer", "step")
    )
    means = _means(gradients, divisor)
    torch_rmsprop(values, means, squares, averages, buffers, steps, foreach=False, **options)


def _means(gradients: list[Tensor], divisor: Tensor | None) -> list[Tensor]:
    return gradients if divisor is None else [gradient.div_(divisor.item()) for gradient in gradients]


KERNELS: Mapping[str, Kernel] = {"SGD": sgd, "Adam": adam, "AdamW": adam}
"""Fused kernels by the optimizer's name, on any device."""

CPU_KERNELS: Mapping[str, Kernel] = {"Adagrad": adagrad, "RMSprop": rmsprop}
"""The others, which only the CPU has."""

_CPU = torch.device("cpu")


class SliceStep:
    """Applies a round's gradients to a slice's values.

    Without an optimizer the values become the mean: the hub averages, and the workers' optimizers step.
    """

    def check(self, hyper: Hyper) -> None:
        """Checks the hyperparameters of a step; without an optimizer none are used.

        Raises:
            ConfigError: `step` cannot use them.
        """

    def step(
        self,
        values: Tensor,
        gradients: Sequence[Tensor],
        count: int,
        hyper: Hyper,
        scratch: Tensor,
        rounded: Tensor | None = None,
    ) -> None:
        """Updates `values` in place with the mean of `count` gradients.

        Args:
            values: Flat.
            gradients: The gradients or sums of some of them, only read; or their sum alone, which must be in
                `scratch`.
            count: At least one.
            hyper: Hyperparameters of this step.
            scratch: At least as long as the values, overwritten. If the gradients have half precision, it is
                float32.
            rounded: Gets an optimizer's new values, in its own dtype; None: nothing does.

        Raises:
            NonFinite: The sum has a NaN or an infinity that must be refused. The affected elements are
                unchanged, but other elements may have stepped, so the values are at no single step.
        """
        torch.div(summed(gradients, scratch), count, out=values)

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint saves besides the values; not copies."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state from `state()` and takes ownership of its tensors."""


class FusedStep(SliceStep):
    """One slice's optimizer: a compiled loop if there is one, otherwise torch's kernel.

    Attributes:
        kernel: Steps and makes the state.
        held: The state itself.
    """

    def __init__(self, name: str, kernel: Kernel, *, finite: bool = False) -> None:
        self.kernel = kernel
        self._name = name
        self._finite = finite
        self._sum = finite_sum if finite else summed
        self.held: dict[str, Tensor] = {}
        self._hyper: Hyper | None = None
        self._options: dict[str, Any] = {}
        self._divisors: dict[int, Tensor | None] = {1: None}
        self._made: dict[tuple[int, torch.dtype], OnePass | None] = {}
        """Compiled loops for the current hyperparameters, by number of gradients and their dtype."""

    def check(self, hyper: Hyper) -> None:
        if hyper != self._hyper:
            self._options = kwargs_of(hyper, self._name)
            self.check_state(hyper)
            self._hyper = hyper
            self._made.clear()

    def check_state(self, hyper: Hyper) -> None:
        """Checks that the state has the tensors that an option needs.

        Raises:
            ConfigError: One is missing, because earlier steps had not that option.
        """
        for option, tensor in OPTIONAL_STATE.get(self._name, {}).items():
            if self.held and hyper[option] and tensor not in self.held:
                raise ConfigError(
                    f"{self._name} got {option}={hyper[option]:g}, but its state has no {tensor}, because"
                    f" earlier steps had no {option}; use {option} from the first step on"
                )

    def step(
        self,
        values: Tensor,
        gradients: Sequence[Tensor],
        count: int,
        hyper: Hyper,
        scratch: Tensor,
        rounded: Tensor | None = None,
    ) -> None:
        if hyper != self._hyper:
            self.check(hyper)
        made = self._one_pass(gradients, rounded) if fits_loops(values) else None
        if made is not None and made.fits(values, self.held):
            elements = made(values, gradients, count, self.held, self._options, rounded)
            if self._finite and not isfinite(elements):
                finite_sum(gradients, scratch)  # raises, unless only the sum of the elements overflows
            return
        if count not in self._divisors:
            self._divisors[count] = torch.tensor(float(count), dtype=torch.float32, device=values.device)
        # The kernel divides too, which saves a pass over memory: 10 % of a round.
        total = self._sum(gradients, scratch)
        self.kernel([values], [total], [self.held], self._options, self._divisors[count])
        if rounded is not None:
            rounded.copy_(values)

    def _one_pass(self, gradients: Sequence[Tensor], rounded: Tensor | None) -> OnePass | None:
        count, reads, writes = len(gradients), gradients[0].dtype, None if rounded is None else rounded.dtype
        if (count, reads) not in self._made:
            self._made[count, reads] = one_pass(
                self._name,
                self.kernel,
                count,
                self._options,
                finite=self._finite,
                reads=reads,
                writes=writes,
            )
        return self._made[count, reads]

    def state(self) -> dict[str, Tensor]:
        return dict(self.held)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.held, self._hyper = dict(state), None  # options are checked against the state


def step_together(
    values: Sequence[Tensor],
    totals: Sequence[Tensor],
    steps: Sequence[FusedStep],
    options: Sequence[Mapping[str, Any]],
    divisor: Tensor | None,
) -> None:
    """Steps several tensors with the sums of their gradients, those that are alike by one call.

    Args:
        values: The tensors, which are too small to be worth a loop each.
        totals: The sums; overwritten.
        steps: Hold the tensors' states.
        options: torch's options for each tensor; one object where they are alike.
        divisor: The number of summed gradients; None for one.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for index, (step, own) in enumerate(zip(steps, options, strict=True)):
        alike.setdefault((id(own), not step.held), []).append(index)
    for indices in alike.values():
        steps[0].kernel(
            [values[index] for index in indices],
            [totals[index] for index in indices],
            [steps[index].held for index in indices],
            options[indices[0]],
            divisor,
        )


def optimizer_for(name: str, device: torch.device = _CPU, *, finite: bool = False) -> SliceStep:
    """Returns the optimizer for a slice with this `BucketSpec.optimizer` on this device.

    With `finite`, an optimizer refuses gradients that are not finite. A mean for the workers' optimizers is
    not checked, because the workers check it.

    Raises:
        ConfigError: The hub does not support the optimizer, or not on this device.
    """
    if not name:
        return SliceStep()
    check_name(name)
    if name in KERNELS:
        return FusedStep(name, KERNELS[name], finite=finite)
    if device.type != "cpu":
        raise ConfigError(
            f"the hub does not support {name} on {device}; use one of {', '.join(KERNELS)}, restart the"
            " server with --device cpu, or start the workers with --aggregate"
        )
    return FusedStep(name, CPU_KERNELS[name], finite=finite)
