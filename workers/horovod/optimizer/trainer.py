"""Connects an optimizer to the worker's runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hubring.workers.horovod.world.world import current
from hubring.workers.runtime import context
from hubring.workers.runtime.worker import Worker, unwatched


@dataclass(slots=True, weakref_slot=True)
class Trainer:
    """Counts an optimizer's steps, so that the hub knows them and can stop the worker after a step.

    Attributes:
        named_parameters: Every trained parameter by name.
        waited: Returns the seconds that training has waited for exchanges.
        groups: Returns the optimizer's parameter groups.
        completed_steps: Number of completed steps.
        ahead: By how many steps other ranks can be ahead; 0, since a step waits for all ranks.
    """

    named_parameters: dict[str, torch.Tensor]
    waited: Callable[[], float]
    groups: Callable[[], list[dict[str, Any]]]
    completed_steps: int = 0
    ahead: int = 0
    _place: Worker | None = None
    _begin_slow: Callable[[int], None] = unwatched

    def __post_init__(self) -> None:
        place = context.started()
        if place is not None and place.communicator is current().communicator:
            self._place = place
            self._begin_slow = place.watch(self.named_parameters.values())

    def begin(self) -> None:
        """Starts training. Call this once the exchange is set up."""
        if self._place is not None:
            self._place.adopt(self)
            self._begin_slow(0)

    @property
    def exchange_seconds(self) -> float:
        return self.waited()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.groups()

    def settle(self) -> None:
        """Does nothing, since no exchange is running after a step."""

    def step_completed(self) -> None:
        """Records a completed step.

        Raises:
            Preempted: The job stops at this step.
        """
        self.completed_steps += 1
        if self._place is not None:
            self._place.step_completed(self.completed_steps)
            self._begin_slow(self.completed_steps)
