"""Who still trains, where ranks may have differently many batches.

The law: every rank asks once a step, when it is as far with it as all others, whether it has a
batch or not. So a step that one rank takes is everybody's, and the first that nobody takes
is the end. (PyTorch's `Join` and Horovod's `join` have the same rule.)
"""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from hubring.ps.core.messages import ReduceOp
from hubring.workers.collectives import allreduce
from hubring.workers.communicators.base import Communicator


class UnevenInputs:
    """Asks all ranks, and lets one that has no batch step with the hyperparameters of those that have.

    Args:
        communicator: Its ranks keep step.
        optimizer: In whose groups numbers may change from step to step.
    """

    def __init__(self, communicator: Communicator, optimizer: Optimizer) -> None:
        self._communicator = communicator
        self._optimizer = optimizer

    def anybody(self, *, trains: bool) -> bool:
        """Whether some rank has a batch in this step; raises as `allreduce` does."""
        groups = self._optimizer.param_groups  # others after load_state_dict
        places = [(group, name) for group in groups for name in group if isinstance(group[name], float)]
        own = [float(group[name]) if trains else -math.inf for group, name in places]
        asked = torch.tensor([float(trains), *own], dtype=torch.float64)
        some, *numbers = allreduce(
            asked, ReduceOp.MAX, "step.trains", communicator=self._communicator
        ).tolist()
        if some and not trains:
            for (group, name), number in zip(places, numbers, strict=True):
                group[name] = number
        return bool(some)
