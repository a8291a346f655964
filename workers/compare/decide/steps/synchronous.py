"""Judges the steps of a row whose workers complete each step together.

    own gradients of all ranks --mean--> arrived --script--> given --optimizer--> update

Where workers step, both arrows of ours are judged separately; on a hub together. What the script does between
them, such as clipping, is taken as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hubring.workers.compare.decide.steps import exchange
from hubring.workers.compare.decide.steps.exchange import (
    EVERYTHING,
    Checked,
    JudgedSteps,
    StepFault,
    Together,
    check_exchange,
    update_fault,
    worst_of,
)
from hubring.workers.compare.decide.steps.recorded import RecordedStep
from hubring.workers.compare.decide.steps.reference import (
    Expected,
    StepReference,
    units_of,
    unknown_optimizer,
)


def check(
    ranks: Sequence[Mapping[int, Sequence[RecordedStep]]], tolerance: float, reach: JudgedSteps = EVERYTHING
) -> Checked:
    """Judges all steps.

    Args:
        ranks: Every rank's steps by optimizer.
        tolerance: Allowed difference of an update, relative to the update.
        reach: What can be judged.
    """
    trainers = sorted(set().union(*ranks))
    return Checked.of_all(
        [_Optimizer([rank.get(each, ()) for rank in ranks], tolerance, reach).check() for each in trainers]
    )


class _Optimizer:
    """Judges the steps of one optimizer."""

    def __init__(self, ranks: Sequence[Sequence[RecordedStep]], tolerance: float, reach: JudgedSteps) -> None:
        self._ranks = ranks
        self._reach = reach
        self._tolerance = tolerance
        self._longest = max(map(len, ranks))
        self._rounds: list[Together] = [
            [rank[number] for rank in ranks] for number in range(min(map(len, ranks)))
        ]

    def check(self) -> Checked:
        judged, unjudged = 0, self._unjudged()
        open_steps = sum(any(one.after is None for one in each) for each in self._rounds)
        written = frozenset(each.step for each in self._ranks[0] if each.written)
        try:
            if not unjudged:
                judged = self._check_updates()
            elif self._reach.exchange:
                self._check_exchanges()
            self._check_counts()
        except StepFault as fault:
            return Checked(self._longest, judged, unjudged, fault.text, fault.step, open_steps, written)
        return Checked(self._longest, judged, unjudged, open=open_steps, written=written)

    def _unjudged(self) -> str:
        """Returns why updates cannot be replayed; empty if they can."""
        steps = [step for each in self._rounds for step in each]
        if self._reach.unjudged:
            return self._reach.unjudged
        if why := unknown_optimizer(steps):
            return why
        if any(step.layout.hooked and step.given is None for step in steps):
            return "the script's hooks change gradients"
        return "the script runs code within step()" if any(step.script_inside for step in steps) else ""

    def _check_counts(self) -> None:
        counts = [len(rank) for rank in self._ranks]
        if len(set(counts)) > 1:
            slow = counts.index(min(counts))
            raise StepFault(
                min(counts) + 1, f"rank {slow} took {min(counts)} steps and another rank {max(counts)}"
            )

    def _check_exchanges(self) -> None:
        for each in self._rounds:
            check_exchange([one.with_parameters_of(self._rounds[-1][0]) for one in each])

    def _check_updates(self) -> int:
        """Judges all steps; returns how many."""
        last = self._rounds[-1][0]
        parameter_of, eps = last.parameter_of, exchange.precision(last.layout, last.parameter_of)
        history = (_history([one.with_parameters_of(last) for one in each]) for each in self._rounds)
        units = units_of(last.layout.dtypes, parameter_of, history)
        reference = StepReference(last.layout.optimizer, units, self._rounds[0][0].options)
        drift, judged = _Drift(eps), 0
        for recorded in self._rounds:
            each = [one.with_parameters_of(last).exact() for one in recorded]
            stepping = _stepped(each, eps)
            check_exchange(each)
            if not bool(stepping.gradient.isfinite().all()):
                break  # the run diverges, and reports that itself
            expected = reference.step(each[0].before, *stepping)
            for rank, one in enumerate(each):
                if one.after is not None:
                    self._check_update(rank, one, one.after, expected, eps, drift)
            judged += all(one.after is not None for one in each)
        drift.check(last)
        return judged

    def _check_update(
        self, rank: int, one: RecordedStep, after: Tensor, expected: Expected, eps: Tensor, drift: _Drift
    ) -> None:
        update, off = expected.after - one.before, after - expected.after
        allowed = exchange.update_allowance(update, expected.doubt, one.parameter_of, self._tolerance)
        bad = ~(off.abs() <= allowed + exchange.storing_allowance(eps, one.before, expected.after)) & one.held
        if bool(bad.any()):
            raise StepFault(one.step, update_fault(one, rank, one.before, expected.after, after, bad))
        drift.add(rank, after, off, update, allowed)


class _Drift:
    """Adds up what is too small to see in one step, such as learning rates that hardly move a parameter."""

    def __init__(self, eps: Tensor) -> None:
        self._eps = eps
        self._sums: defaultdict[int, Tensor] = defaultdict(lambda: torch.zeros(3, *eps.shape).double())
        self._ulp = torch.zeros_like(eps)
        self._steps = 0

    def add(self, rank: int, after: Tensor, off: Tensor, update: Tensor, allowed: Tensor) -> None:
        self._sums[rank] += torch.stack((off, update, allowed))
        self._ulp = torch.maximum(self._ulp, self._eps * after.abs())
        self._steps += rank == 0

    def check(self, last: RecordedStep) -> None:
        """Raises Fault if all steps together are off by more than rounding explains."""
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


class _Stepping(NamedTuple):
    """The arguments of `Reference.step` that follow the parameters."""

    gradient: Tensor
    rounding: Tensor
    there: Tensor
    groups: Tensor
    options: Sequence[dict[str, Any]]


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


def _stepped(each: Together, eps: Tensor) -> _Stepping:
    """Returns what a step of all ranks is taken with."""
    leader = _leader(each)
    groups = torch.tensor(leader.layout.groups)[leader.parameter_of]
    if leader.layout.steps_on == "worker" and leader.given is not None:
        gradient, rounding = leader.given, eps * leader.given.abs()
    else:
        given = torch.stack([one.own if one.given is None else one.given for one in each])
        gradient, rounding = given.mean(0), exchange.mean_allowance(eps, given)
    return _Stepping(gradient, rounding, _there(each, leader), groups, leader.options)
