"""What the worker is told of an optimizer that trains here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hubring.workers.horovod.world.world import current
from hubring.workers.runtime import context
from hubring.workers.runtime.worker import Worker, unwatched


@dataclass(slots=True, weakref_slot=True)
class Trainer:
    """Counts an optimizer's steps, so that the hub knows of them and may stop the worker after one.

    Attributes:
        named_parameters: Every trained parameter by name.
        waited: Tells the seconds for which exchanges have kept training waiting.
        completed_steps: How many were taken.
        ahead: By how many steps others may be ahead: none, as a step waits for all.
    """

    named_parameters: dict[str, torch.Tensor]
    waited: Callable[[], float]
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
        """Training begins: what the optimizer exchanges by is in place."""
        if self._place is not None:
            self._place.adopt(self)
            self._begin_slow(0)

    @property
    def exchange_seconds(self) -> float:
        return self.waited()

    def synchronize(self) -> None:
        """Returns at once: a step leaves nothing under way."""

    def step_completed(self) -> None:
        """Counts a step.

        Raises:
            Preempted: The job stops at this step.
        """
        self.completed_steps += 1
        if self._place is not None:
            self._place.step_completed(self.completed_steps)
            self._begin_slow(self.completed_steps)
