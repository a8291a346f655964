"""Judges an asynchronous row: replays all pushes of all ranks, in the order in which the hub applied them.

A hub steps each of its keys by itself. The answer to a push tells after how many other pushes it was applied,
so the order is known for each key. Every answer has the parameters of one version, which are compared with
the replayed ones; the replay then goes on from the answer, so rounding does not add up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.workers.compare.gate.recorded_steps import RecordedStep, StepsOfOptimizers, by_optimizer
from hubring.workers.compare.gate.step_reference import (
    Checked,
    StepFault,
    StepReference,
    TakenStep,
    precision,
    storing_allowance,
    units_of,
    unknown_optimizer,
    update_allowance,
    update_fault,
)
from hubring.workers.compare.gate.synchronous_steps import check_exchange


class RecordedPush(NamedTuple):
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


def check(
    ranks: Sequence[StepsOfOptimizers], tolerance: float, unjudged: str = "", *, exchange: bool = True
) -> Checked:
    """Judges all pushes. Arguments are as in `synchronous_steps.check`."""
    return Checked.of_all([_check(own, tolerance, unjudged, exchange) for own in by_optimizer(ranks)])


def _check(
    ranks: Sequence[Sequence[RecordedStep]], tolerance: float, unjudged: str, exchange: bool
) -> Checked:
    """Judges the pushes of one optimizer."""
    taken, unjudged = sum(map(len, ranks)), unjudged or _unjudged(ranks)
    try:
        if exchange:
            for one in (step for steps in ranks for step in steps):
                check_exchange([one])
        _check_pushed(ranks)
        left_open = {(rank, each[-1].step) for rank, each in enumerate(ranks) if each and not each[-1].waits}
        for key, every in pushes_by_key(ranks).items():
            pushes = _known(every) if left_open else every
            left_open.update((one.rank, one.step.step) for one in every[len(pushes) :])
            _check_order(key, pushes, complete=not left_open)
            if not unjudged:
                _replay(key, pushes, tolerance)
    except StepFault as fault:
        return Checked(taken, 0, unjudged, fault.text, fault.step)
    return Checked(taken, 0 if unjudged else taken - len(left_open), unjudged, open=len(left_open))


def _unjudged(ranks: Sequence[Sequence[RecordedStep]]) -> str:
    """Returns why the pushes cannot be replayed; empty if they can."""
    steps = [step for each in ranks for step in each]
    if why := unknown_optimizer(steps):
        return why
    if any(step.script_inside for step in steps):
        return "the script runs code within step()"
    if any(len(steps[-1].own) != len(steps[0].own) for steps in ranks if steps):
        return "its parameters changed during training"
    return ""


def _check_pushed(ranks: Sequence[Sequence[RecordedStep]]) -> None:
    """Checks that every rank pushed to every key in every step.

    Raises:
        StepFault: A rank left out a push, or pushed twice.
    """
    for rank, steps in enumerate(ranks):
        pushed: Counter[int] = Counter()
        for number, step in enumerate(steps, 1):
            pushed.update(key for key, _, _ in step.pushes)
            # A step that does not wait for the answers to its pushes records them later, the last one never.
            late = 0 if step.waits else 1
            for key in sorted({*step.layout.keys, *pushed}):
                if not number - late <= pushed[key] <= number:
                    often = "once" if pushed[key] == 1 else f"{pushed[key]} times"
                    raise StepFault(
                        step.step,
                        f"rank {rank} has pushed {often} to key {key} in {number} steps; expected one push in"
                        " each",
                    )


def pushes_by_key(ranks: Sequence[Sequence[RecordedStep]]) -> dict[int, list[RecordedPush]]:
    """Returns the pushes to each key in the order in which they were applied."""
    found: defaultdict[int, list[RecordedPush]] = defaultdict(list)
    for rank, steps in enumerate(ranks):
        pushed: Counter[int] = Counter()
        for key, position, version in (push for step in steps for push in step.pushes):
            # One in each step, but the answer can come in the next one.
            found[key].append(RecordedPush(position, version, rank, steps[pushed[key]]))
            pushed[key] += 1
    return {key: sorted(pushes, key=lambda one: one[:3]) for key, pushes in found.items()}


def _known(pushes: list[RecordedPush]) -> list[RecordedPush]:
    """Returns the pushes before the first unknown one. Those of the last steps are answered too late."""
    apart = (number for number, (one, other) in enumerate(pairwise(pushes), 1) if other[0] > one[0] + 1)
    return pushes[: next(apart, len(pushes))]


def _check_order(key: int, pushes: Sequence[RecordedPush], *, complete: bool) -> None:
    """Checks that every push was applied exactly once, and nothing else.

    Args:
        key: The key.
        pushes: Its pushes in order.
        complete: Whether these are all.

    Raises:
        StepFault: One was applied twice or not at all, or an answer is older than its push.
    """
    for one, other in pairwise(pushes):
        if other.position == one.position:
            raise StepFault(
                other.step.step,
                f"pushes of ranks {one.rank} and {other.rank} to key {key} were both applied as number"
                f" {one.position}",
            )
        if other.position != one.position + 1:
            raise StepFault(
                other.step.step,
                f"key {key} was stepped {other.position - one.position} times between two pushes that follow"
                " each other",
            )
    for one in pushes:
        if one.version <= one.position:
            raise StepFault(
                one.step.step, f"rank {one.rank} got parameters without its own push from key {key}"
            )
    newest = max(one.version for one in pushes)
    if complete and newest > pushes[-1].position + 1:
        raise StepFault(
            pushes[-1].step.step,
            f"key {key} was stepped {newest} times, and the ranks pushed {pushes[-1].position + 1} times",
        )


def _replay(key: int, pushes: Sequence[RecordedPush], tolerance: float) -> None:
    """Raises StepFault at the first answer that is not what the pushes to a key make of its parameters."""
    first = pushes[0].step
    layout, parameter_of = first.layout, first.parameter_of
    own = torch.tensor(layout.keys) == key
    if not bool(own.any()):
        return

    def there(step: RecordedStep) -> Tensor:
        return (step.owns if step.given is None else step.gives) & own

    groups, eps = torch.tensor(layout.groups)[parameter_of], precision(layout, parameter_of)
    exact = precision(layout, parameter_of, stepped=True)
    history = (torch.where(there(one.step), groups, -1) for one in pushes)
    units = units_of(layout.stepped, parameter_of, history, among=own)
    reference = StepReference(layout.optimizer, units, first.options)
    answers: defaultdict[int, list[RecordedPush]] = defaultdict(list)
    for one in pushes:
        answers[one.version].append(one)
    values = first.exact().before  # which its rank pulled when no push had been applied
    anchor, allowed = values, torch.zeros_like(values)
    for one in pushes:
        step = one.step.exact()
        gradient = step.own if step.given is None else step.given
        if not bool(gradient.isfinite().all()):
            return
        taken = TakenStep(gradient, exact * gradient.abs(), there(step), groups, step.options)
        expected = reference.step(values, taken)
        update = (expected.after - values) * own
        allowed = allowed + update_allowance(update, expected.doubt, parameter_of, tolerance)
        allowed = allowed + storing_allowance(eps, values, expected.after)
        values = expected.after
        for answered in answers[one.position + 1]:
            after = answered.step.exact().after
            if after is None:
                continue
            bad = ~((after - values).abs() <= allowed) & own
            if bool(bad.any()):
                text = update_fault(answered.step, answered.rank, anchor, values, after, bad)
                raise StepFault(answered.step.step, f"after push {answered.position} to the hub, {text}")
            values = torch.where(own, after, values)
        if answers[one.position + 1]:
            anchor, allowed = values, torch.zeros_like(values)
