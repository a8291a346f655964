"""Words for what a step did wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from hubring.workers.compare.judge.steps.recorded import RecordedStep

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
