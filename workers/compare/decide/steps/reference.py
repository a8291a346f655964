"""The reference: torch's own optimizer, in one process, on the recorded elements.

torch's optimizers treat each element by itself, except those that `REPLAYED` leaves out. So a few elements
tell what a step does, and the optimizer's state follows from the gradients of all earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from hubring.workers.compare.decide.steps.recorded import RecordedStep

REPLAYED = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
)
"""Classes of torch.optim that treat each element by itself."""

_OURS: dict[str, Any] = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
"""Options that only choose among implementations of the same step."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Elements that have a gradient in the same steps, and always the same group and dtype.

    Attributes:
        elements: Their places among the recorded ones: int64.
        dtype: Of their parameters.
    """

    elements: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step should do, by element, in float64.

    Attributes:
        after: The parameters after the step.
        doubt: How far rounding of the gradients can move them.
    """

    after: Tensor
    doubt: Tensor


def unknown_optimizer(steps: Sequence[RecordedStep]) -> str:
    """Returns why no reference can take these steps, of all ranks in order; empty if one can."""
    if not steps:
        return "no step was taken"
    if steps[0].layout.optimizer not in REPLAYED:
        return "its optimizer is not one of torch's that treat each element by itself"
    if not all(step.layout.fresh for step in steps):
        return "its optimizer's state was loaded or cleared"
    return ""


class StepReference:
    """Takes the steps of one optimizer twice: with the gradients, and with gradients as they can be rounded.

    Args:
        optimizer: A name in `REPLAYED`.
        units: The elements.
        options: The first step's options of each group.
    """

    def __init__(self, optimizer: str, units: Sequence[Unit], options: Sequence[dict[str, Any]]) -> None:
        self._units = units
        self._both = [_Optimizer(optimizer, units, options) for _ in range(2)]
        self._noise = torch.Generator().manual_seed(0)

    def step(
        self,
        before: Tensor,
        gradient: Tensor,
        rounding: Tensor,
        there: Tensor,
        groups: Tensor,
        options: Sequence[dict[str, Any]],
    ) -> Expected:
        """Takes one step.

        Args:
            before: The parameters before it, by element.
            gradient: The mean gradient.
            rounding: By how much the gradient can be rounded.
            there: Whether elements have a gradient.
            groups: Each element's group.
            options: The options of each group.
        """
        signs = torch.randint(0, 2, gradient.shape, generator=self._noise) * 2 - 1
        nothing = torch.zeros_like(rounding)
        exact, rounded = (
            one.step(before, gradient + error, there, groups, options)
            for one, error in zip(self._both, (nothing, rounding * signs), strict=True)
        )
        return Expected(exact, (exact - rounded).abs())


class _Optimizer:
    def __init__(self, name: str, units: Sequence[Unit], options: Sequence[dict[str, Any]]) -> None:
        kind: Any = getattr(torch.optim, name)
        self._units = units
        self._parameters = [
            torch.nn.Parameter(torch.zeros(len(unit.elements), dtype=unit.dtype)) for unit in units
        ]
        accepted = signature(kind).parameters
        first = {key: value for key, value in options[0].items() if key in accepted} if options else {}
        self._optimizer = kind(self._parameters, **{**first, **_known(accepted)})
        self._defaults = {
            key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"
        }

    def step(
        self,
        before: Tensor,
        gradient: Tensor,
        there: Tensor,
        groups: Tensor,
        options: Sequence[dict[str, Any]],
    ) -> Tensor:
        members: list[list[torch.nn.Parameter]] = [[] for _ in options]
        for unit, parameter in zip(self._units, self._parameters, strict=True):
            first = unit.elements[0]
            group = int(groups[first])
            if not bool(there[first]) or group < 0:
                parameter.grad = None
                continue
            parameter.data.copy_(before[unit.elements])
            parameter.grad = gradient[unit.elements].to(unit.dtype)
            members[group].append(parameter)
        self._optimizer.param_groups = [
            {**self._defaults, **each, **_known(self._defaults), "params": own}
            for each, own in zip(options, members, strict=True)
            if own
        ]
        if self._optimizer.param_groups:
            self._optimizer.step()
        after = before.clone()
        for unit, parameter in zip(self._units, self._parameters, strict=True):
            if parameter.grad is not None:
                after[unit.elements] = parameter.detach().double()
        return after


def _known(names: Any) -> dict[str, Any]:
    return {key: value for key, value in _OURS.items() if key in names}


def units_of(
    dtypes: Sequence[str],
    parameter_of: Tensor,
    histories: Iterable[Tensor],
    among: Tensor | None = None,
) -> list[Unit]:
    """Returns the elements, as few units as possible.

    Args:
        dtypes: Of the parameters.
        parameter_of: The parameter of each element.
        histories: In each step a number for each element; elements of a unit have the same in each step.
        among: Which elements to return; None: all.
    """
    wanted = torch.ones(len(parameter_of), dtype=torch.bool) if among is None else among
    distinct = {each.numpy().tobytes(): each for each in histories}  # most steps have the same
    history = torch.stack(list(distinct.values())) if distinct else torch.zeros(0, len(parameter_of))
    alike: dict[tuple[str, bytes], list[int]] = {}
    for number, dtype in enumerate(dtypes):
        elements = (wanted & (parameter_of == number)).nonzero().flatten()
        if len(elements):
            alike.setdefault((dtype, history[:, elements[0]].numpy().tobytes()), []).append(number)
    return [
        Unit((wanted & torch.isin(parameter_of, torch.tensor(numbers))).nonzero().flatten(), _dtype(dtype))
        for (dtype, _), numbers in alike.items()
    ]


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
