"""Judges the exchange of one step: whether what arrived follows from the gradients that autograd made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hubring.workers.compare.judge.steps import allowance
from hubring.workers.compare.judge.steps.checked import Fault
from hubring.workers.compare.judge.steps.fault_text import exchange_fault
from hubring.workers.compare.judge.steps.recorded import RecordedStep

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
    eps = allowance.precision(layout, each[0].parameter_of)
    each = [one.exact() for one in each]
    own = torch.stack([one.own for one in each])
    for one in each:
        if one.arrived is None:
            continue
        wanted = own.mean(0) if averages else one.own
        allowed = allowance.of_mean(eps, own) if averages else 8 * eps * one.own.abs()
        if not bool(wanted.isfinite().all()):
            continue  # a scaled gradient overflowed: the step was skipped, or training diverges
        off = (one.arrived - wanted).abs()
        bad = ~(off <= allowed + _TINY) & (one.owns | averages) & one.held
        if bool(bad.any()):
            raise Fault(one.step, exchange_fault(one, off, bad, own))
