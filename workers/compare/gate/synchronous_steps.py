"""Judges the steps of a row whose workers complete each step together, and the exchange of any row.

    own gradients of all ranks --mean--> arrived --script--> given --optimizer--> update

Where workers step, both arrows of ours are judged separately; on a hub together. What the script does between
them, such as clipping, is taken as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from hubring.workers.compare.gate.recorded_steps import (
    RecordedStep,
    StepsOfOptimizers,
    by_optimizer,
    mean_of,
)
from hubring.workers.compare.gate.step_reference import (
    Checked,
    Expected,
    StepFault,
    StepReference,
    TakenStep,
    mean_allowance,
    precision,
    storing_allowance,
    units_of,
    unknown_optimizer,
    update_allowance,
    update_fault,
    worst_of,
)

Together = Sequence[RecordedStep]
"""The same step of all ranks, in rank order."""

_TINY = 1e-44
"""Rounding of numbers that are too small for float32's precision."""


def check(
    ranks: Sequence[StepsOfOptimizers],
    tolerance: float,
    unjudged: str = "",
    *,
    exchange: bool = True,
    others: Sequence[Sequence[RecordedStep]] = (),
) -> Checked:
    """Judges all steps.

    Args:
        ranks: Every rank's steps by optimizer.
        tolerance: Allowed difference of an update, relative to the update.
        unjudged: Why updates cannot be replayed, if that is known before; empty if it is not.
        exchange: Whether exchanges can be judged.
        others: Every rank's steps of other elements. Each is judged alone, from the recorded state.
    """
    found = Checked.of_all([_check(own, tolerance, unjudged, exchange) for own in by_optimizer(ranks)])
    for each in () if found.fault else zip(*others, strict=False):
        if len({(one.layout.trainer, one.step) for one in each}) == 1:
            other = _check([[one] for one in each], tolerance, unjudged, exchange)
            if other.fault:
                return replace(found, fault=other.fault, step=other.step)
    return found


def _check(
    ranks: Sequence[Sequence[RecordedStep]], tolerance: float, unjudged: str, exchange: bool
) -> Checked:
    """Judges the steps of one optimizer."""
    rounds: list[Together] = list(zip(*ranks, strict=False))
    taken, judged, unjudged = max(map(len, ranks)), 0, unjudged or _unjudged(rounds)
    open_steps = sum(any(one.after is None for one in each) for each in rounds)
    written = frozenset(each.step for each in ranks[0] if each.written)
    try:
        if not unjudged:
            judged = _check_updates(rounds, tolerance)
        elif exchange:
            for each in rounds:
                check_exchange([one.with_parameters_of(rounds[-1][0]) for one in each])
        _check_counts([len(rank) for rank in ranks])
    except StepFault as fault:
        return Checked(taken, judged, unjudged, fault.text, fault.step, open_steps, written)
    return Checked(taken, judged, unjudged, open=open_steps, written=written)


def _unjudged(rounds: Sequence[Together]) -> str:
    """Returns why updates cannot be replayed; empty if they can."""
    steps = [step for each in rounds for step in each]
    if why := unknown_optimizer(steps):
        return why
    if any(step.layout.hooked and step.given is None for step in steps):
        return "the script's hooks change gradients"
    return "the script runs code within step()" if any(step.script_inside for step in steps) else ""


def _check_counts(counts: Sequence[int]) -> None:
    least, most = min(counts), max(counts)
    if least < most:
        raise StepFault(least + 1, f"rank {counts.index(least)} took {least} steps and another rank {most}")


def _check_updates(rounds: Sequence[Together], tolerance: float) -> int:
    """Judges all steps; returns how many."""
    last = rounds[-1][0]
    parameter_of, eps = last.parameter_of, precision(last.layout, last.parameter_of)
    exact = precision(last.layout, parameter_of, stepped=True)
    history = [_history([one.with_parameters_of(last) for one in each]) for each in rounds]
    state = next((one.state for one in rounds[0] if one.state), {})
    history += [each.isnan().long() for each in state.values()]
    history += [state["step"].nan_to_num(-1.0).long()] if "step" in state else []
    units = units_of(last.layout.stepped, parameter_of, history)
    reference = StepReference(last.layout.optimizer, units, rounds[0][0].options)
    updates, judged = _Updates(eps, tolerance), 0
    for recorded in rounds:
        each = [one.with_parameters_of(last).exact() for one in recorded]
        taken = _taken(each, exact)
        check_exchange(each)
        if last.layout.trainer < 0 and not reference.begin_from(state, each[0].before, taken):
            return 0  # the row keeps its state elsewhere
        if not bool(taken.gradient.isfinite().all()):
            break  # the run diverges, and reports that itself
        expected = reference.step(each[0].before, taken)
        for rank, one in enumerate(each):
            if one.after is not None:
                updates.check(rank, one, one.after, expected)
        judged += all(one.after is not None for one in each)
    updates.check_sums(last)
    return judged


class _Updates:
    """Judges each update, and the sums of what is too small to see in one, as with low learning rates."""

    def __init__(self, eps: Tensor, tolerance: float) -> None:
        self._eps, self._tolerance = eps, tolerance
        self._sums: defaultdict[int, Tensor] = defaultdict(lambda: torch.zeros(3, *eps.shape).double())
        self._ulp = torch.zeros_like(eps)
        self._steps = 0

    def check(self, rank: int, one: RecordedStep, after: Tensor, expected: Expected) -> None:
        """Raises StepFault if the update is not the expected one."""
        update, off = expected.after - one.before, after - expected.after
        allowed = update_allowance(update, expected.doubt, one.parameter_of, self._tolerance)
        bad = ~(off.abs() <= allowed + storing_allowance(self._eps, one.before, expected.after)) & one.held
        if bool(bad.any()):
            raise StepFault(one.step, update_fault(one, rank, one.before, expected.after, after, bad))
        self._sums[rank] += torch.stack((off, update, allowed))
        self._ulp = torch.maximum(self._ulp, self._eps * after.abs())
        self._steps += rank == 0

    def check_sums(self, last: RecordedStep) -> None:
        """Raises StepFault if all steps together are off by more than rounding explains."""
        for rank, (off, wanted, allowed) in self._sums.items():
            bad = ~(off.abs() <= allowed + self._ulp * (4 + 2 * self._steps**0.5))
            if bool(bad.any()):
                name, worst = worst_of(last, off.abs(), bad)
                moved = float(wanted[worst])
                raise StepFault(
                    0,
                    f"all {self._steps} steps together moved an element of {name} by"
                    f" {moved + float(off[worst]):.3g} on rank {rank}, instead of by {moved:.3g}",
                )


def _leader(each: Together) -> RecordedStep:
    """Returns the step of the rank whose gradients, options and groups count."""
    return next((one for one in each if one.given is not None and bool(one.gives.any())), each[0])


def _there(each: Together, leader: RecordedStep) -> Tensor:
    """Returns which elements are stepped."""
    if leader.layout.steps_on == "worker" and leader.given is not None:
        return leader.gives
    return torch.stack([one.owns if one.given is None else one.gives for one in each]).any(0)


def _history(each: Together) -> Tensor:
    """Returns the group with which each element is stepped; -1: it is not."""
    leader = _leader(each)
    groups = torch.tensor(leader.layout.groups)[leader.parameter_of]
    return torch.where(_there(each, leader), groups, -1)


def _taken(each: Together, eps: Tensor) -> TakenStep:
    """Returns what a step of all ranks is taken with."""
    leader = _leader(each)
    groups = torch.tensor(leader.layout.groups)[leader.parameter_of]
    if leader.layout.steps_on == "worker" and leader.given is not None:
        gradient, rounding = leader.given, eps * leader.given.abs()
    else:
        given = torch.stack([one.own if one.given is None else one.given for one in each])
        gradient, rounding = mean_of(given, _weights(each)), mean_allowance(eps, given)
    return TakenStep(gradient, rounding, _there(each, leader), groups, leader.options)


def _weights(each: Together) -> list[float]:
    return [one.weight for one in each]


def check_exchange(each: Together) -> None:
    """Judges the gradients when backward had returned. On a hub that steps, they are still the rank's own.

    Raises:
        StepFault: They are others.
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
        wanted = mean_of(own, _weights(each)) if averages else one.own
        allowed = mean_allowance(eps, own) if averages else 8 * eps * one.own.abs()
        if not bool(wanted.isfinite().all()):
            continue  # a scaled gradient overflowed: the step was skipped, or training diverges
        off = (one.arrived - wanted).abs()
        bad = ~(off <= allowed + _TINY) & (one.owns | averages) & one.held
        if bool(bad.any()):
            raise StepFault(one.step, _exchange_fault(one, off, bad, own))


def _exchange_fault(one: RecordedStep, off: Tensor, bad: Tensor, own: Tensor) -> str:
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


def _lost(arrived: Tensor, own: Tensor) -> str:
    """Returns which rank's gradient is missing in a mean, as the end of a clause; empty if none is."""
    ranks = len(own)
    for rank in range(ranks):
        others = own.sum(0) - own[rank]
        for number in {ranks, ranks - 1} - {0}:
            if float((arrived - others / number).norm()) <= 1e-3 * float(arrived.norm()):
                return f", as if rank {rank} had sent nothing"
    return ""
