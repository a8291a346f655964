"""The hub's step in the place of the wrapped optimizer's.

A script may register hooks on the wrapped optimizer's `step`, or replace `step` itself, as schedulers do. All
of that runs in torch's order: the wrapped optimizer's `step` is called, and the exchange is its last hook
before the step. The optimizer then finds no gradients, so it changes nothing: the hub has stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


class HubStep:
    """Calls the wrapped optimizer's `step` around an exchange.

    Args:
        optimizer: The wrapped optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def runs_before(self) -> bool:
        """Whether the script has code that runs before the step and may change gradients."""
        step = vars(self._optimizer).get("step")
        replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
        return replaced or bool(self._optimizer._optimizer_step_pre_hooks)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the step runs."""
        optimizer = self._optimizer
        return "step" not in vars(optimizer) and not (
            optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        )

    def run(self, exchange: Callable[[], None]) -> None:
        """Takes the hub's step. Raises as `exchange`."""
        if self.is_plain:
            exchange()
            return
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        with _hidden_gradients(parameters) as (hide, show):

            def before(*_: object) -> None:
                exchange()
                hide()

            last = self._optimizer.register_step_pre_hook(before)
            first = self._optimizer.register_step_post_hook(lambda *_: show())
            hooks: Any = self._optimizer._optimizer_step_post_hooks  # an OrderedDict, though typed as a dict
            hooks.move_to_end(first.id, last=False)
            try:
                self._optimizer.step()
            finally:
                last.remove()
                first.remove()


@contextmanager
def _hidden_gradients(
    parameters: list[torch.nn.Parameter],
) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Returns functions that take all gradients away and give them back; they are back in any case."""
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def hide() -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def show() -> None:
        while gradients:
            parameter, gradient = gradients.pop()
            parameter.grad = gradient

    try:
        yield hide, show
    finally:
        show()
