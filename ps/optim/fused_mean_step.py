"""A mean and an optimizer's step in one pass over memory, in torch's very bits.

torch sums two gradients, and steps with their sum: the sum is written and read once more. Here each cache
line of gradients, parameters and state is read once, and what changes is written once. The arithmetic is that
of torch's fused kernels, operation by operation, down to which of them round once. So every loop is held
against torch's kernels when it is made, bit by bit. Where it differs, on another processor or with another
torch, or without llvmlite, there is none, and torch's serve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hubring.ps.optim.fused import KERNELS, Kernel, Options, State
from hubring.ps.optim.loops_available import LANES, work
from hubring.ps.optim.sums import MOST, finite_sum, summed

if TYPE_CHECKING:
    from hubring.ps.optim.llvm_loops import Arithmetic, Vector

log = logging.getLogger(__name__)

_LEAST_BETA = 0.51
"""Up to a half, as rounded to float32, torch interpolates from the other end."""


class Step(NamedTuple):
    """One optimizer's arithmetic.

    Attributes:
        state: Names of the state's tensors that change.
        numbers: What it computes with, by name, in a step of these options and state.
        write: Makes new values and state of the old ones, the mean gradient and the numbers.
    """

    state: tuple[str, ...]
    numbers: Callable[[Options, State], Mapping[str, float]]
    write: Callable[[Arithmetic, Vector, list[Vector], Vector, Mapping[str, Vector]], list[Vector]]


class OnePass:
    """Steps values by the mean of some number of gradients.

    Args:
        step: The optimizer's arithmetic.
        kernel: torch's, for the elements after the last whole vector.
        gradients: How many are summed.
        options: Which of them are zero, and which way it steps, is fixed by these.
        finite: Whether elements stay as they are where the sum of the gradients is NaN or infinite.
    """

    def __init__(self, step: Step, kernel: Kernel, gradients: int, options: Options, *, finite: bool) -> None:
        self._step = step
        self._kernel = kernel
        self._finite = finite
        self._sum = finite_sum if finite else summed
        names = step.numbers(options, {"step": torch.ones(())})

        def body(
            at: Arithmetic, changed: list[Vector], read: list[Vector], number: Mapping[str, Vector]
        ) -> list[Vector]:
            total = at.sum(read)
            mean = at.div(total, number["count"])
            gradient = at.neg(mean) if options["maximize"] else mean
            stepped = step.write(at, changed[0], changed[1:], gradient, number)
            if finite:
                pairs = zip(stepped, changed, strict=True)
                stepped = [at.where_finite(total, new, old) for new, old in pairs]
            return [*stepped, total] if finite else stepped

        from hubring.ps.optim.llvm_loops import Loop

        self._loop = Loop(1 + len(step.state), gradients, ["count", *names], body, adds_up=finite)

    def goes_on_from(self, values: Tensor, state: State) -> bool:
        """Whether these values have a state to step from: an optimizer's first step makes it, and is torch's.

        A loop takes memory by its address. So what is not like the values is torch's to refuse.
        """
        return all(
            name in state and state[name].shape == values.shape and state[name].dtype == values.dtype
            for name in self._step.state
        )

    def __call__(
        self, values: Tensor, gradients: Sequence[Tensor], count: int, state: State, options: Options
    ) -> float:
        """Updates values and state, as torch's kernel would with the sum of the gradients.

        Args:
            values: Flat, contiguous, float32, as all the others; at least a vector's.
            gradients: As many as this was made for; only read.
            count: By what their sum is divided.
            state: As torch's kernel left it.
            options: torch's, with zeros where there were zeros when this was made.

        Returns:
            If all must be finite: the sum of all elements of the gradients' sum, which is finite only if
            each of them is.

        Raises:
            NonFinite: What is left for torch's kernel is not, and should be; nothing has changed.
        """
        elements = 0.0
        whole = values.numel() // LANES * LANES
        if whole < values.numel():
            rest = {name: tensor[whole:] if tensor.dim() else tensor for name, tensor in state.items()}
            total = self._sum([gradient[whole:] for gradient in gradients], torch.empty(LANES)).clone()
            if self._finite:
                elements = float(total.sum())  # before the kernel, which may leave the mean there
            self._kernel(values[whole:], total, rest, options, torch.tensor(float(count)))
        elif "step" in state:
            state["step"] += 1
        numbers = {"count": float(count), **self._step.numbers(options, state)}
        changed = [values, *(state[name] for name in self._step.state)]
        return elements + self._loop(changed, gradients, numbers)


def one_pass(name: str, gradients: int, options: Options, *, finite: bool) -> OnePass | None:
    """What does the work of torch's fused kernel of this name; None where nothing does.

    Args:
        name: The optimizer's.
        gradients: How many are summed.
        options: Which of them are zero tells which arithmetic it is.
        finite: Whether elements stay as they are where the sum of the gradients is NaN or infinite.
    """
    if gradients > MOST or not work():
        return None
    if name == "SGD":
        plain, decays = options["momentum"] == 0, options["weight_decay"] != 0
        return _sgd(gradients, plain, decays, options["nesterov"], options["maximize"], finite)
    decay = options["weight_decay"] != 0, options["decoupled_weight_decay"]
    if options["amsgrad"] or options["betas"][0] < _LEAST_BETA:
        return None
    return _adam(gradients, *decay, options["maximize"], finite)


@cache
def _sgd(
    gradients: int, plain: bool, decays: bool, nesterov: bool, maximize: bool, finite: bool
) -> OnePass | None:
    """`torch.optim.SGD`'s; `plain`: without momentum."""

    def numbers(options: Options, _: State) -> Mapping[str, float]:
        return {
            "decay": options["weight_decay"],
            "momentum": options["momentum"],
            "taken": 1 - options["dampening"],
            "minus_rate": -options["lr"],
        }

    def write(
        at: Arithmetic, values: Vector, state: list[Vector], gradient: Vector, number: Mapping[str, Vector]
    ) -> list[Vector]:
        if decays:
            gradient = at.fma(values, number["decay"], gradient)
        if plain:
            return [at.fma(gradient, number["minus_rate"], values)]
        buffer = at.fma(gradient, number["taken"], at.mul(state[0], number["momentum"]))
        step = at.fma(buffer, number["momentum"], gradient) if nesterov else buffer
        return [at.fma(step, number["minus_rate"], values), buffer]

    step = Step(() if plain else ("momentum_buffer",), numbers, write)
    options = {
        "lr": 0.03,
        "momentum": 0.0 if plain else 0.9,
        "dampening": 0.0 if plain or nesterov else 0.2,
        "weight_decay": 0.01 if decays else 0.0,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    return _proven("SGD", step, gradients, options, finite=finite)


@cache
def _adam(gradients: int, decays: bool, decoupled: bool, maximize: bool, finite: bool) -> OnePass | None:
    """That of `torch.optim.Adam`, and of `AdamW` where decay is `decoupled`."""

    def numbers(options: Options, state: State) -> Mapping[str, float]:
        (beta1, beta2), taken = options["betas"], float(state["step"])
        decay, rate = options["weight_decay"], options["lr"]
        return {
            "decay": 1 - rate * decay if decoupled else decay,
            "gain1": 1 - beta1,
            "beta2": beta2,
            "gain2": 1 - beta2,
            "root": sqrt(1 - beta2**taken),
            "eps": options["eps"],
            "minus_rate": -(rate / (1 - beta1**taken)),
        }

    def write(
        at: Arithmetic, values: Vector, state: list[Vector], gradient: Vector, number: Mapping[str, Vector]
    ) -> list[Vector]:
        first, second = state
        if decays and decoupled:
            values = at.mul(values, number["decay"])
        elif decays:
            gradient = at.fma(values, number["decay"], gradient)
        first = at.fma(number["gain1"], at.sub(gradient, first), first)
        square = at.mul(number["gain2"], gradient)
        second = at.fma(square, gradient, at.mul(second, number["beta2"]))
        width = at.add(at.div(at.sqrt(second), number["root"]), number["eps"])
        return [at.add(values, at.div(at.mul(number["minus_rate"], first), width)), first, second]

    step = Step(("exp_avg", "exp_avg_sq"), numbers, write)
    options = {
        "lr": 0.03,
        "betas": (0.9, 0.99),
        "eps": 1e-6,
        "weight_decay": 0.01 if decays else 0.0,
        "amsgrad": False,
        "maximize": maximize,
        "decoupled_weight_decay": decoupled,
    }
    return _proven("AdamW" if decoupled else "Adam", step, gradients, options, finite=finite)


def _proven(name: str, step: Step, gradients: int, options: Options, *, finite: bool) -> OnePass | None:
    """The step as a loop, if it makes of random numbers the very bits that torch's kernels make of them."""
    made = OnePass(step, KERNELS[name], gradients, options, finite=finite)
    if _agrees(made, KERNELS[name], gradients, options):
        return made
    log.info("%s steps by torch's kernels: a loop for this processor rounds otherwise", name)
    return None


def _agrees(made: OnePass, kernel: Kernel, gradients: int, options: Options) -> bool:
    """Whether two steps of both, after a first one of torch's, end in the same bits."""
    source = torch.Generator().manual_seed(0)
    values, *parts = (torch.randn(64 * LANES + 5, generator=source) for _ in range(1 + gradients))
    divisor, state = torch.tensor(float(gradients)), State()

    def step_by_torch() -> None:
        kernel(values, summed(parts, torch.empty_like(values)).clone(), state, options, divisor)

    step_by_torch()
    own, own_state = values.clone(), {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(2):
        step_by_torch()
        made(own, parts, gradients, own_state, options)
    return _bits(own) == _bits(values) and all(_bits(own_state[name]) == _bits(state[name]) for name in state)


def _bits(tensor: Tensor) -> list[int]:
    """By which -0 is not 0."""
    return tensor.view(torch.int32).reshape(-1).tolist()
