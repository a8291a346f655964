"""What a check of steps finds, and the reference: torch's own optimizer, in one process.

torch's optimizers treat each element by itself, except those that `REPLAYED` leaves out. So a few elements
tell what a step does, and the optimizer's state follows from the gradients of all earlier steps. An
allowance is how far rounding can move a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from hubring.workers.audit.audit_file import ModelLayout
from hubring.workers.compare.gate.recorded_steps import RecordedStep


class Checked(Struct, frozen=True):
    """What the steps of one run show.

    Attributes:
        taken: Steps that the run took.
        judged: Steps whose update was compared with the reference's.
        unjudged: Why the others were not; empty if all were.
        fault: What is wrong, as a clause; empty if nothing is.
        step: The step of the fault; 0: none, or no single one.
        open: Steps without known parameters after them: the last ones, if `step()` does not wait.
        written: Steps before which something other than a step changed parameters.
    """

    taken: int
    judged: int
    unjudged: str = ""
    fault: str = ""
    step: int = 0
    open: int = 0
    written: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every step that can be was judged, and nothing is wrong."""
        return 0 < self.judged == self.taken - self.open and not self.fault

    @classmethod
    def of_all(cls, each: Sequence[Checked]) -> Checked:
        """Returns what several optimizers of one run show: their sums, and the first fault."""
        wrong = next((one for one in each if one.fault), None)
        return cls(
            taken=sum(one.taken for one in each),
            judged=sum(one.judged for one in each),
            unjudged=next((one.unjudged for one in each if one.unjudged), ""),
            fault=wrong.fault if wrong else "",
            step=wrong.step if wrong else 0,
            open=sum(one.open for one in each),
            written=frozenset[int]().union(*(one.written for one in each)),
        )


class StepFault(Exception):
    """A step did something else than it should.

    Args:
        step: The step; 0: no single one.
        text: What it did, as a clause.
    """

    def __init__(self, step: int, text: str) -> None:
        super().__init__(text)
        self.step = step
        self.text = text


REPLAYED = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
)
"""Classes of torch.optim that treat each element by itself."""

_OURS: dict[str, Any] = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
"""Options that only choose among implementations of the same step."""


class Unit(Struct, frozen=True):
    """Elements that have a gradient in the same steps, and always the same group and dtype.

    Attributes:
        elements: Their places among the recorded ones: int64.
        dtype: The one that their parameters are stepped in.
    """

    elements: Tensor
    dtype: torch.dtype


class Expected(Struct, frozen=True):
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


class TakenStep(NamedTuple):
    """What a step is taken with.

    Attributes:
        gradient: The mean gradient, by element.
        rounding: By how much it can be rounded.
        there: Whether elements have a gradient.
        groups: Each element's group.
        options: The options of each group.
    """

    gradient: Tensor
    rounding: Tensor
    there: Tensor
    groups: Tensor
    options: Sequence[dict[str, Any]]


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

    def begin_from(self, state: Mapping[str, Tensor], before: Tensor, taken: TakenStep) -> bool:
        """Takes over the optimizer's state before a step; returns whether that is all that it needs.

        Args:
            state: Of each element by its name; NaN: none.
            before: The parameters before the step.
            taken: What the step is taken with.
        """
        first, second = (one.begin_from(state, before, taken) for one in self._both)
        return first and second

    def step(self, before: Tensor, taken: TakenStep) -> Expected:
        """Takes one step from the parameters before it, by element."""
        signs = torch.randint(0, 2, taken.gradient.shape, generator=self._noise) * 2 - 1
        other = taken._replace(gradient=taken.gradient + taken.rounding * signs)
        exact, rounded = (one.step(before, how) for one, how in zip(self._both, (taken, other), strict=True))
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

    def begin_from(self, state: Mapping[str, Tensor], before: Tensor, taken: TakenStep) -> bool:
        self.step(before, taken)  # torch makes the state that is needed
        for unit, parameter in zip(self._units, self._parameters, strict=True):
            own = self._optimizer.state[parameter]
            needed = {name: value for name, value in own.items() if isinstance(value, Tensor)}
            if not needed.keys() <= state.keys():
                return False
            known = {name: state[name][unit.elements] for name in needed}
            if any(bool(each.isnan().any()) for each in known.values()):
                del self._optimizer.state[parameter]  # this is its first step
                continue
            for name, value in needed.items():
                value.copy_(known[name] if value.dim() else known[name][0])
        return True

    def step(self, before: Tensor, taken: TakenStep) -> Tensor:
        members: list[list[torch.nn.Parameter]] = [[] for _ in taken.options]
        for unit, parameter in zip(self._units, self._parameters, strict=True):
            first = unit.elements[0]
            group = int(taken.groups[first])
            if not bool(taken.there[first]) or group < 0:
                parameter.grad = None
                continue
            parameter.data.copy_(before[unit.elements])
            parameter.grad = taken.gradient[unit.elements].to(unit.dtype)
            members[group].append(parameter)
        self._optimizer.param_groups = [
            {**self._defaults, **each, **_known(self._defaults), "params": own}
            for each, own in zip(taken.options, members, strict=True)
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
        dtypes: Those that the parameters are stepped in.
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
        Unit(
            (wanted & torch.isin(parameter_of, torch.tensor(numbers))).nonzero().flatten(),
            getattr(torch, dtype),
        )
        for (dtype, _), numbers in alike.items()
    ]


DOUBT = 32.0
"""How often the measured effect of rounded gradients is allowed. One draw of signs shows only part of it."""

ULPS = 2.0
"""Allowed units in the last place of a parameter, in one step. A hub may fuse or reorder two roundings."""


def precision(layout: ModelLayout, parameter_of: Tensor, *, stepped: bool = False) -> Tensor:
    """Returns the relative rounding error of each element's dtype, which is at least that of the record.

    With `stepped`, the dtype is the one that it is stepped in.
    """
    dtypes = layout.stepped if stepped else layout.dtypes
    record = torch.finfo(torch.float64 if layout.wide else torch.float32).eps
    eps = [max(record, torch.finfo(getattr(torch, each)).eps) for each in dtypes]
    return torch.tensor(eps, dtype=torch.float64)[parameter_of]


def mean_allowance(eps: Tensor, gradients: Tensor) -> Tensor:
    """Returns how far the mean of gradients can be off, by element.

    Args:
        eps: The result of `precision`.
        gradients: All ranks' gradients: [ranks, elements].
    """
    return (4 + 2 * len(gradients)) * eps * gradients.abs().amax(0)


def update_allowance(update: Tensor, doubt: Tensor, parameter_of: Tensor, tolerance: float) -> Tensor:
    """Returns how far an update can be off, by element, without the rounding of the parameter itself.

    Args:
        update: What the reference adds to the parameters.
        doubt: How far rounding of the gradients can move them.
        parameter_of: The parameter of each element.
        tolerance: Allowed difference, relative to the update's root mean square over its parameter.
    """
    return tolerance * _size_of(update, parameter_of) + DOUBT * doubt


def storing_allowance(eps: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Returns how far a parameter can be off because a step rounds it, by element."""
    return ULPS * (eps * torch.maximum(before.abs(), after.abs()))


def _size_of(update: Tensor, parameter_of: Tensor) -> Tensor:
    """Returns the root mean square of each element's parameter."""
    count = int(parameter_of.max()) + 1 if len(parameter_of) else 0
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, parameter_of, update.square())
    numbers = torch.bincount(parameter_of, minlength=count).clamp(min=1)
    return (sums / numbers).sqrt()[parameter_of]


ALIKE = 0.02
"""Two updates that differ by less, once one is scaled, are said to be multiples of each other."""


def worst_of(one: RecordedStep, off: Tensor, bad: Tensor) -> tuple[str, int]:
    """Returns the element with the largest difference of the bad ones, behind its parameter's name."""
    worst = int(torch.where(bad, off.nan_to_num(torch.inf), -1.0).argmax())
    return one.layout.names[int(one.parameter_of[worst])], worst


def update_fault(
    one: RecordedStep, rank: int, before: Tensor, expected: Tensor, after: Tensor, bad: Tensor
) -> str:
    """Describes an update that is not the reference's, as a clause.

    Args:
        one: The rank's step.
        rank: The rank.
        before: The parameters before the step.
        expected: The reference's parameters after it.
        after: The rank's.
        bad: The elements that are off by too much.
    """
    name, worst = worst_of(one, (after - expected).abs(), bad)
    within = one.parameter_of == one.parameter_of[worst]
    wanted, found = (expected - before)[within], (after - before)[within]
    size = float(wanted.norm())
    if not size:
        return f"{name} changed on rank {rank}, and torch's {one.layout.optimizer} leaves it as it is"
    relative = float((found - wanted).norm()) / size
    text = f"the update of {name} on rank {rank} is off by {relative:.2g} of its size"
    factor = float(found @ wanted) / size**2
    scaled = float((found - factor * wanted).norm()) <= ALIKE * float(found.norm())
    if scaled and abs(factor - 1) > relative / 2:  # else something else is off
        return f"{text}: it is {factor:.5g} times what torch's {one.layout.optimizer} does in one process"
    return text
