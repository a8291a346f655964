"""When a peer exchanges that does not come with an optimizer of its own."""

from __future__ import annotations

from typing import Any

import torch

from hubring.workers.optimizer.distributed import DistributedOptimizer


class AfterBackward(DistributedOptimizer):
    """Exchanges once backward has ended, as scripts do that exchange by hand: no computing hides any of it.

    What a script asks for to hide more is not heard; it changes no number.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None, **told: Any
    ) -> None:
        super().__init__(optimizer, model, **{**told, "overlap": False, "cross_barrier": False})
