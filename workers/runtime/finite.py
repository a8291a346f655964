"""Parameters that are NaN or infinite, which no later step mends.

A hub refuses gradients that would make them so. Where workers step, a gradient
that is not finite is the script's affair, as a GradScaler skips such steps: there
parameters are looked at when a metric tells that something is wrong, and before
they are saved. Neither costs a step anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from hubring.ps.core.errors import NonFinite
from hubring.ps.optim.finite import all_finite


def check(parameters: Iterable[Mapping[str, Tensor]], rank: int, step: int) -> None:
    """Makes sure that all are finite.

    Args:
        parameters: Of each optimizer, by name.
        rank: This worker's, for the message.
        step: Completed steps, for the message.

    Raises:
        NonFinite: Names the first that is not.
    """
    for named in parameters:
        for name, parameter in named.items():
            values = parameter.detach()
            if not all_finite(values):
                worst = values[~values.isfinite()][0].item()
                raise NonFinite(
                    f"rank {rank}'s parameter {name} {list(parameter.shape)} holds {worst} after step {step};"
                    f" {NonFinite.mend}"
                )
