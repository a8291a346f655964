"""Judges the exchange of one step, and holds what all checks of a step share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hubring.workers.audit.audit_file import ModelLayout
from hubring.workers.compare.decide.steps.recorded import RecordedStep


@dataclass(frozen=True, slots=True)
class Checked:
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


@dataclass(frozen=True, slots=True)
class JudgedSteps:
    """What of a run's steps can be judged.

    Attributes:
        unjudged: Why updates cannot be replayed, if that is known before; empty if it is not.
        exchange: Whether exchanges can be judged.
    """

    unjudged: str = ""
    exchange: bool = True


EVERYTHING = JudgedSteps()


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


DOUBT = 32.0
"""How often the measured effect of rounded gradients is allowed. One draw of signs shows only part of it."""

ULPS = 2.0
"""Allowed units in the last place of a parameter, in one step. A hub may fuse or reorder two roundings."""


def precision(layout: ModelLayout, parameter_of: Tensor) -> Tensor:
    """Returns the relative rounding error of each element's dtype, which is at least that of the record."""
    record = torch.finfo(torch.float64 if layout.wide else torch.float32).eps
    eps = [max(record, torch.finfo(getattr(torch, each)).eps) for each in layout.dtypes]
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


def exchange_fault(one: RecordedStep, off: Tensor, bad: Tensor, own: Tensor) -> str:
    """Describes gradients that are not the mean, or not this rank's own, as a clause.

    Args:
        one: The rank's step.
        off: By how much each element is off.
        bad: The elements that are off by too much.
        own: All ranks' own gradients: [ranks, elements].
    """
    (name, worst), rank = worst_of(one, off, bad), one.layout.rank
    if one.layout.steps_on == "server":
        return f"the gradient of {name} on rank {rank} is not the one that autograd made there"
    assert one.arrived is not None
    within = one.parameter_of == one.parameter_of[worst]
    text = f"the gradient of {name} that arrived on rank {rank} is not the mean of all ranks"
    return text + _lost(one.arrived[within], own[:, within])


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
    if float((found - factor * wanted).norm()) <= ALIKE * float(found.norm()):
        return f"{text}: it is {factor:.3g} times what torch's {one.layout.optimizer} does in one process"
    return text


def _lost(arrived: Tensor, own: Tensor) -> str:
    """Returns which rank's gradient is missing in a mean, as the end of a clause; empty if none is."""
    ranks = len(own)
    for rank in range(ranks):
        others = own.sum(0) - own[rank]
        for number in {ranks, ranks - 1} - {0}:
            if float((arrived - others / number).norm()) <= 1e-3 * float(arrived.norm()):
                return f", as if rank {rank} had sent nothing"
    return ""


Together = Sequence[RecordedStep]
"""The same step of all ranks, in rank order."""

_TINY = 1e-44
"""Rounding of numbers that are too small for float32's precision."""


def check_exchange(each: Together) -> None:
    """Judges the gradients when backward had returned. On a hub that steps, they are still the rank's own.

    Raises:
        Fault: They are others.
    """
    layout = each[0].layout
    if any(one.layout.hooked for one in each):
        return
    averages = layout.steps_on == "worker"
    eps = precision(layout, each[0].parameter_of)
    each = [one.exact() for one in each]
    own = torch.stack([one.own for one in each])
    for one in each:
        if one.arrived is None:
            continue
        wanted = own.mean(0) if averages else one.own
        allowed = mean_allowance(eps, own) if averages else 8 * eps * one.own.abs()
        if not bool(wanted.isfinite().all()):
            continue  # a scaled gradient overflowed: the step was skipped, or training diverges
        off = (one.arrived - wanted).abs()
        bad = ~(off <= allowed + _TINY) & (one.owns | averages) & one.held
        if bool(bad.any()):
            raise StepFault(one.step, exchange_fault(one, off, bad, own))
