"""Judges an asynchronous row: replays all pushes of all ranks, in the order in which the hub applied them.

A hub steps each of its keys by itself. The answer to a push tells after how many other pushes it was applied,
so the order is known for each key. Every answer has the parameters of one version, which are compared with
the replayed ones; the replay then goes on from the answer, so rounding does not add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.workers.compare.judge.steps import allowance
from hubring.workers.compare.judge.steps.checked import Checked, Fault
from hubring.workers.compare.judge.steps.exchange import check_exchange
from hubring.workers.compare.judge.steps.fault_text import update_fault
from hubring.workers.compare.judge.steps.recorded import RecordedStep
from hubring.workers.compare.judge.steps.reference import Reference, units_of, unknown_optimizer


class _Push(NamedTuple):
    """A push of one rank to one key.

    Attributes:
        position: How many pushes were applied to the key before it.
        version: How many the parameters in its answer have.
        rank: The rank that sent it.
        step: The rank's step.
    """

    position: int
    version: int
    rank: int
    step: RecordedStep


def check(ranks: Sequence[Mapping[int, Sequence[RecordedStep]]], tolerance: float) -> Checked:
    """Judges all pushes. Arguments are as in `synchronous.check`."""
    taken = sum(len(steps) for rank in ranks for steps in rank.values())
    judged = 0
    try:
        for trainer in sorted(set().union(*ranks)):
            each = [rank.get(trainer, ()) for rank in ranks]
            for one in (step for steps in each for step in steps):
                check_exchange([one])
            if unjudged := _unjudged(each):
                return Checked(taken, judged, unjudged)
            for key, pushes in _by_key(each).items():
                _check_order(key, pushes)
                _Replay(key, pushes, tolerance).check()
            judged += sum(map(len, each))
    except Fault as fault:
        return Checked(taken, judged, "", fault.text, fault.step)
    return Checked(taken, judged)


def _unjudged(ranks: Sequence[Sequence[RecordedStep]]) -> str:
    """Returns why the pushes cannot be replayed; empty if they can."""
    steps = [step for each in ranks for step in each]
    if why := unknown_optimizer(steps):
        return why
    if any(step.open for step in steps):
        return "the script runs code within step()"
    if any(len(steps[-1].own) != len(steps[0].own) for steps in ranks if steps):
        return "its parameters changed during training"
    return ""


def _by_key(ranks: Sequence[Sequence[RecordedStep]]) -> dict[int, list[_Push]]:
    """Returns the pushes to each key in the order in which they were applied."""
    found: defaultdict[int, list[_Push]] = defaultdict(list)
    for rank, steps in enumerate(ranks):
        for step in steps:
            for key, position, version in step.pushes:
                found[key].append(_Push(position, version, rank, step))
    return {key: sorted(pushes, key=lambda one: one[:3]) for key, pushes in found.items()}


def _check_order(key: int, pushes: Sequence[_Push]) -> None:
    """Checks that every push was applied exactly once, and nothing else.

    Raises:
        Fault: One was applied twice or not at all, or an answer is older than its push.
    """
    for one, other in pairwise(pushes):
        if other.position == one.position:
            raise Fault(
                other.step.step,
                f"pushes of ranks {one.rank} and {other.rank} to key {key} were both applied as number"
                f" {one.position}",
            )
        if other.position != one.position + 1:
            raise Fault(
                other.step.step,
                f"key {key} was stepped {other.position - one.position} times between two pushes that follow"
                " each other",
            )
    for one in pushes:
        if one.version <= one.position:
            raise Fault(one.step.step, f"rank {one.rank} got parameters without its own push from key {key}")
    newest = max(one.version for one in pushes)
    if newest > pushes[-1].position + 1:
        raise Fault(
            pushes[-1].step.step,
            f"key {key} was stepped {newest} times, and the ranks pushed {pushes[-1].position + 1} times",
        )


class _Replay:
    """Replays the pushes to one key."""

    def __init__(self, key: int, pushes: Sequence[_Push], tolerance: float) -> None:
        self._pushes, self._tolerance = pushes, tolerance
        first = pushes[0].step
        self._layout = first.layout
        self._own = torch.tensor(first.layout.keys) == key
        self._parameter_of = first.parameter_of
        self._eps = allowance.precision(first.layout, first.parameter_of)
        self._answers: defaultdict[int, list[_Push]] = defaultdict(list)
        for one in pushes:
            self._answers[one.version].append(one)

    def check(self) -> None:
        """Raises Fault at the first answer that is not what the pushes make of the parameters."""
        if not bool(self._own.any()):
            return
        rounds = [self._there(one.step) for one in self._pushes]
        numbers = torch.tensor(self._layout.groups)[self._parameter_of]
        history = [torch.where(there, numbers, -1) for there in rounds]
        units = units_of(self._layout.dtypes, self._parameter_of, history, among=self._own)
        reference = Reference(self._layout.optimizer, units, self._pushes[0].step.options)
        values = self._pushes[0].step.before  # which its rank pulled when no push had been applied
        anchor, allowed = values, torch.zeros_like(values)
        for one, there in zip(self._pushes, rounds, strict=True):
            gradient = one.step.own if one.step.given is None else one.step.given
            if not bool(gradient.isfinite().all()):
                return
            rounding = self._eps * gradient.abs()
            expected = reference.step(values, gradient, rounding, there, numbers, one.step.options)
            update = (expected.after - values) * self._own
            allowed = allowed + allowance.of_update(
                update, expected.doubt, self._parameter_of, self._tolerance
            )
            allowed = allowed + allowance.of_storing(self._eps, values, expected.after)
            values = expected.after
            for answered in self._answers.get(one.position + 1, ()):
                if answered.step.after is not None:
                    self._compare(answered, answered.step.after, anchor, values, allowed)
                    values = torch.where(self._own, answered.step.after, values)
            if one.position + 1 in self._answers:
                anchor, allowed = values, torch.zeros_like(values)

    def _there(self, step: RecordedStep) -> Tensor:
        gives = step.owns if step.given is None else step.gives
        return gives & self._own

    def _compare(
        self, answered: _Push, after: Tensor, anchor: Tensor, values: Tensor, allowed: Tensor
    ) -> None:
        off = (after - values).abs()
        bad = ~(off <= allowed) & self._own
        if bool(bad.any()):
            text = update_fault(answered.step, answered.rank, anchor, values, after, bad)
            raise Fault(answered.step.step, f"after push {answered.position} to the hub, {text}")
