"""Interfaces between a worker and its optimizers, and between a worker and its checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Trainer(Protocol):
    """What a worker needs from an optimizer."""

    @property
    def exchange_seconds(self) -> float:
        """Seconds so far that training waited for exchanges."""

    @property
    def completed_steps(self) -> int:
        """Completed steps, including the steps before a restart."""

    ahead: int
    """Steps that another rank can be ahead of this one: 1 if `step()` does not wait, else 0."""

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """All trained parameters by name."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, with their learning rates."""

    def settle(self) -> None:
        """Waits until the parameters are the last step's result."""


class Saves(Protocol):
    """Saves the state of a job whose workers step: `hubring.workers.optimizer.checkpoints`."""

    @property
    def due(self) -> bool:
        """Whether it is time for a periodic checkpoint."""

    def save_in_passing(self) -> None:
        """Saves a periodic checkpoint. Logs a failure and does not raise it."""

    def save(self) -> None:
        """Saves the last step."""

    def save_together(self) -> None:
        """Saves the last step. Returns on every rank only once it is saved."""

    def close(self) -> None:
        """Releases the folder."""
