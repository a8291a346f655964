"""The exchange of peers that have no optimizer of their own: after backward."""

from __future__ import annotations

from typing import Any

import torch

from hubring.workers.optimizer.distributed import DistributedOptimizer


class AfterBackward(DistributedOptimizer):
    """Exchanges after backward, without overlap, as scripts do that exchange by hand.

    Options for more overlap are ignored; they do not change the result.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__(optimizer, model, **{**options, "overlap": False, "cross_barrier": False})
