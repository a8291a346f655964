"""What a worker asks of those who train here: an optimizer, and whoever keeps its state."""

from __future__ import annotations

from typing import Protocol

import torch


class Trainer(Protocol):
    """What a worker wants to know of an optimizer that trains a model here."""

    @property
    def exchange_seconds(self) -> float:
        """Time that exchanges took from training so far."""

    @property
    def completed_steps(self) -> int:
        """How many it has taken, those before a restart among them."""

    ahead: int
    """Steps by which another rank may have completed more than this one: 1 where none waits in `step()`."""

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Every trained parameter by name."""

    def synchronize(self) -> None:
        """Waits until the parameters are those of the last step."""


class Saves(Protocol):
    """Keeps what no hub keeps: `hubring.workers.optimizer.checkpoints`."""

    @property
    def due(self) -> bool:
        """Whether it is time to save in passing."""

    def save_in_passing(self) -> None:
        """Saves; a failure is told in the log alone."""

    def save(self) -> None:
        """Saves the last step."""

    def save_together(self) -> None:
        """Saves the last step and returns on no rank before that is done."""

    def close(self) -> None:
        """Leaves its folder to others."""
