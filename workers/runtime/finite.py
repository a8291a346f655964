"""Finds parameters that are NaN or infinite. No later step makes them finite again.

A hub refuses gradients that are not finite. Where workers step, such a gradient can be
normal: a GradScaler skips the step. There, parameters are checked when a reported metric
is not finite and before they are saved. A step itself does no check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from hubring.ps.core.errors import NonFinite
from hubring.ps.optim.finite import all_finite


def check(parameters: Iterable[Mapping[str, Tensor]], rank: int, step: int) -> None:
    """Checks that all parameters are finite.

    Args:
        parameters: The parameters of each optimizer, by name.
        rank: This worker's rank, for the error message.
        step: Completed steps, for the error message.

    Raises:
        NonFinite: A parameter is not finite. The error names the first one.
    """
    for named in parameters:
        for name, parameter in named.items():
            values = parameter.detach()
            if not all_finite(values):
                worst = values[~values.isfinite()][0].item()
                raise NonFinite(
                    f"rank {rank}'s parameter {name} {list(parameter.shape)} holds {worst} after step {step};"
                    f" {NonFinite.fix}"
                )
