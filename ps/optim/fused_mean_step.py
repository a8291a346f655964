"""A mean and a step in one pass over memory, bitwise equal to torch's fused kernels.

torch sums the gradients first and then steps with the sum, so the sum is written and read once more. In one
pass each cache line of gradients, parameters and state is read once, and each changed line is written once.
The arithmetic follows torch's fused kernels operation by operation, including fused multiply-adds. Every loop
is compared bitwise with torch's kernel when it is compiled. If the results differ, for example on another
processor or with another torch, or without llvmlite, torch's kernels are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hubring.ps.optim.sums import MOST, finite_sum, loops_work, summed

if TYPE_CHECKING:
    from hubring.ps.optim.llvm_loops import Arithmetic, Numbers, Vector, Vectors

State = dict[str, Tensor]
Options = Mapping[str, Any]

Tensors = list[Tensor]
States = Sequence[State]
Divisor = Tensor | None

Kernel = Callable[[Tensors, Tensors, States, Options, Divisor], None]
"""Updates tensors and the state of each with gradient / divisor; may overwrite gradients with the quotients.
All of the states are empty, or none."""

log = logging.getLogger(__name__)

_LEAST_BETA = 0.51
"""The smallest beta1 for a loop. Up to 0.5 (as float32), torch's kernels interpolate differently."""


class StepArithmetic(NamedTuple):
    """One optimizer's arithmetic.

    Attributes:
        state: Names of the state's tensors that change.
        numbers: Returns the scalars of a step, by name, from its options and state.
        write: Computes new values and state from the old ones, the mean gradient and the scalars.
    """

    state: tuple[str, ...]
    numbers: Callable[[Options, State], Mapping[str, float]]
    write: Callable[[Arithmetic, Vector, Vectors, Vector, Numbers], Vectors]


class OnePass:
    """Steps values with the mean of a fixed number of gradients.

    Args:
        step: The optimizer's arithmetic.
        kernel: torch's kernel, for the elements after the last whole vector.
        gradients: How many gradients are summed.
        options: They fix which options are zero, and the direction of the step.
        finite: Whether elements stay unchanged where the sum of the gradients is NaN or infinite.
        reads: The dtype of the gradients, which are summed in float32.
        writes: The dtype of what gets the values, rounded; None: nothing does.
    """

    def __init__(
        self,
        step: StepArithmetic,
        kernel: Kernel,
        gradients: int,
        options: Options,
        *,
        finite: bool,
        reads: torch.dtype,
        writes: torch.dtype | None,
    ) -> None:
        self._step = step
        self._kernel = kernel
        self._finite = finite
        self._sum = finite_sum if finite else summed
        names = step.numbers(options, {"step": torch.ones((), dtype=torch.float32, device="cpu")})

        def body(at: Arithmetic, changed: Vectors, read: Vectors, number: Numbers) -> Vectors:
            total = at.sum(read)
            mean = at.div(total, number["count"])
            gradient = at.neg(mean) if options["maximize"] else mean
            stepped = step.write(at, changed[0], changed[1:], gradient, number)
            if finite:
                pairs = zip(stepped, changed, strict=True)
                stepped = [at.where_finite(total, new, old) for new, old in pairs]
            return [*stepped, total] if finite else stepped

        from hubring.ps.optim.llvm_loops import Loop

        many = 1 + len(step.state)
        self._loop = Loop(
            many, gradients, ["count", *names], body, adds_up=finite, reads=reads, writes=writes
        )

    def fits(self, values: Tensor, state: State) -> bool:
        """Returns whether the state fits these values. torch's kernel makes the first step and the state.

        A loop gets raw addresses, so it must not run with a state of another shape or dtype. torch's kernel
        refuses such a state.
        """
        return all(
            name in state and state[name].shape == values.shape and state[name].dtype == values.dtype
            for name in self._step.state
        )

    def __call__(
        self,
        values: Tensor,
        gradients: Sequence[Tensor],
        count: int,
        state: State,
        options: Options,
        rounded: Tensor | None = None,
    ) -> float:
        """Updates values and state, as torch's kernel does with the sum of the gradients.

        Args:
            values: Flat, contiguous, float32, like the state; at least one vector long.
            gradients: The number of gradients from `__init__`, in its dtype; only read.
            count: The divisor of the sum.
            state: The state that torch's kernel created.
            options: torch's options, with zeros where the options of `__init__` have zeros.
            rounded: Gets the new values, in the dtype that `__init__` writes.

        Returns:
            With `finite`, the sum of all elements of the gradients' sum, which is finite only if each
            element is.

        Raises:
            NonFinite: With `finite`, an element after the last whole vector is not finite. Nothing has
                changed.
        """
        elements = 0.0
        lanes = self._loop.lanes
        whole = values.numel() // lanes * lanes
        if whole < values.numel():
            rest = {name: tensor[whole:] if tensor.dim() else tensor for name, tensor in state.items()}
            total = self._sum(
                [gradient[whole:] for gradient in gradients],
                torch.empty(lanes, dtype=torch.float32, device="cpu"),
            ).clone()
            if self._finite:
                elements = float(total.sum())  # before the kernel, which may overwrite it
            divisor = torch.tensor(float(count), dtype=torch.float32, device="cpu")
            self._kernel([values[whole:]], [total], [rest], options, divisor)
            if rounded is not None:
                rounded[whole:].copy_(values[whole:])
        elif "step" in state:
            state["step"] += 1
        numbers = {"count": float(count), **self._step.numbers(options, state)}
        changed = [values, *(state[name] for name in self._step.state)]
        return elements + self._loop(changed, gradients, numbers, () if rounded is None else (rounded,))


_SAMPLE: Options = {
    "lr": 0.03,
    "momentum": 0.9,
    "dampening": 0.2,
    "weight_decay": 0.01,
    "betas": (0.9, 0.99),
    "eps": 1e-6,
}
"""Numbers with which a loop is compared with torch's kernel."""


def one_pass(
    name: str,
    kernel: Kernel,
    gradients: int,
    options: Options,
    *,
    finite: bool,
    reads: torch.dtype = torch.float32,
    writes: torch.dtype | None = None,
) -> OnePass | None:
    """Returns a replacement for torch's fused kernel; None if there is none.

    Args:
        name: The optimizer.
        kernel: torch's kernel for it.
        gradients: How many gradients are summed.
        options: The options that are zero select the arithmetic.
        finite: Whether elements stay unchanged where the sum of the gradients is NaN or infinite.
        reads: The dtype of the gradients: float32, or one of half precision.
        writes: The dtype of what gets the values, rounded; None: nothing does.
    """
    if name not in _ARITHMETIC or gradients > MOST or not loops_work():
        return None
    from hubring.ps.optim.llvm_loops import converts

    if not (converts(reads) and (writes is None or converts(writes))):
        return None
    if name != "SGD" and (options["amsgrad"] or options["betas"][0] < _LEAST_BETA):
        return None
    nonzero = {option: number for option, number in _SAMPLE.items() if options.get(option)}
    sample = {**options, **nonzero, "lr": _SAMPLE["lr"]}
    return _compiled(name, kernel, gradients, tuple(sample.items()), finite, reads, writes)


@cache
def _compiled(
    name: str,
    kernel: Kernel,
    gradients: int,
    sample: tuple[tuple[str, Any], ...],
    finite: bool,
    reads: torch.dtype,
    writes: torch.dtype | None,
) -> OnePass | None:
    """Compiles the step; returns None if its results on random numbers differ bitwise from torch's."""
    options = dict(sample)
    arithmetic = _ARITHMETIC[name](options)
    made = OnePass(arithmetic, kernel, gradients, options, finite=finite, reads=reads, writes=writes)
    if _agrees(made, kernel, gradients, options, reads, writes):
        return made
    log.info("%s uses torch's kernel: the compiled loop rounds differently on this processor", name)
    return None


def _sgd(options: Options) -> StepArithmetic:
    """Returns the arithmetic of `torch.optim.SGD`."""
    plain, decays, nesterov = options["momentum"] == 0, options["weight_decay"] != 0, options["nesterov"]

    def numbers(options: Options, _: State) -> Mapping[str, float]:
        return {
            "decay": options["weight_decay"],
            "momentum": options["momentum"],
            "taken": 1 - options["dampening"],
            "minus_rate": -options["lr"],
        }

    def write(at: Arithmetic, values: Vector, state: Vectors, gradient: Vector, number: Numbers) -> Vectors:
        if decays:
            gradient = at.fma(values, number["decay"], gradient)
        if plain:
            return [at.fma(gradient, number["minus_rate"], values)]
        buffer = at.fma(gradient, number["taken"], at.mul(state[0], number["momentum"]))
        step = at.fma(buffer, number["momentum"], gradient) if nesterov else buffer
        return [at.fma(step, number["minus_rate"], values), buffer]

    return StepArithmetic(() if plain else ("momentum_buffer",), numbers, write)


def _adam(options: Options) -> StepArithmetic:
    """Returns the arithmetic of `torch.optim.Adam`, or `AdamW` if the decay is decoupled."""
    decays, decoupled = options["weight_decay"] != 0, options["decoupled_weight_decay"]

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

    def write(at: Arithmetic, values: Vector, state: Vectors, gradient: Vector, number: Numbers) -> Vectors:
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

    return StepArithmetic(("exp_avg", "exp_avg_sq"), numbers, write)


_ARITHMETIC = {"SGD": _sgd, "Adam": _adam, "AdamW": _adam}


def _agrees(
    made: OnePass,
    kernel: Kernel,
    gradients: int,
    options: Options,
    reads: torch.dtype,
    writes: torch.dtype | None,
) -> bool:
    """Returns whether two steps of both, after a first step of torch's kernel, are bitwise equal."""
    source = torch.Generator().manual_seed(0)
    values, *parts = (
        torch.randn(64 * 16 + 5, generator=source, dtype=torch.float32, device="cpu")
        for _ in range(1 + gradients)
    )
    parts = [part.to(reads) for part in parts]
    rounded = None if writes is None else values.to(writes)
    divisor, state = torch.tensor(float(gradients), dtype=torch.float32, device="cpu"), State()

    def step_by_torch() -> None:
        kernel([values], [summed(parts, torch.empty_like(values)).clone()], [state], options, divisor)

    step_by_torch()
    own, own_state = values.clone(), {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(2):
        step_by_torch()
        made(own, parts, gradients, own_state, options, rounded)
    if rounded is not None and not torch.equal(rounded, values.to(rounded.dtype)):
        return False
    return _bits(own) == _bits(values) and all(_bits(own_state[name]) == _bits(state[name]) for name in state)


def _bits(tensor: Tensor) -> list[int]:
    """Returns the bits of each element, in which -0 differs from 0."""
    return tensor.view(torch.int32).reshape(-1).tolist()
