"""torch's fused kernels on one slice, without the `Optimizer` class.

`Optimizer.step` spends 30 to 60 us on groups, hooks and checks. The kernel takes
200 us for a slice of 4 MiB, and much less for a small slice. The state has torch's
names, so that it is exchangeable with the optimizer's. The kernels are the same, so
the results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hubring.ps.optim.zeros import zeros_like

State = dict[str, Tensor]
Options = Mapping[str, Any]

Kernel = Callable[[Tensor, Tensor, State, Options, Tensor | None], None]
"""Updates values and state with gradient / divisor; may overwrite gradient with the quotient."""


def sgd(values: Tensor, gradient: Tensor, state: State, options: Options, divisor: Tensor | None) -> None:
    """`torch.optim.SGD`'s step."""
    first = options["momentum"] != 0 and "momentum_buffer" not in state
    if first:
        state["momentum_buffer"] = zeros_like(values)
    buffers = [state["momentum_buffer"]] if options["momentum"] != 0 else []
    torch._fused_sgd_([values], [gradient], buffers, **options, is_first_step=first, grad_scale=divisor)


def adam(values: Tensor, gradient: Tensor, state: State, options: Options, divisor: Tensor | None) -> None:
    """The step of `torch.optim.Adam` and `AdamW`, which differ in one option."""
    if not state:
        state["step"] = torch.zeros((), device=values.device)
        state["exp_avg"], state["exp_avg_sq"] = zeros_like(values), zeros_like(values)
    if options["amsgrad"] and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = zeros_like(values)
    kernel = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
    state["step"] += 1
    kernel(
        [values],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if options["amsgrad"] else [],
        [state["step"]],
        lr=options["lr"],
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        amsgrad=options["amsgrad"],
        maximize=options["maximize"],
        grad_scale=divisor,
    )


KERNELS: Mapping[str, Kernel] = {"SGD": sgd, "Adam": adam, "AdamW": adam}
"""By the optimizer's name."""
