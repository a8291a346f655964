"""Finds out which ranks still train if ranks have different numbers of batches.

Every rank asks once per step, at the same point of the step, whether it has a batch or not.
So all ranks take a step if one rank does, and training ends at the first step that no rank
takes. PyTorch's `Join` and Horovod's `join` have the same rule.
"""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from hubring.ps.core.messages import ReduceOp
from hubring.workers.collectives import allreduce
from hubring.workers.communicators.base import Communicator


class UnevenInputs:
    """Asks all ranks, and copies hyperparameters to ranks without a batch.

    Args:
        communicator: Its ranks must be in lockstep.
        optimizer: The optimizer whose float hyperparameters are copied.
    """

    def __init__(self, communicator: Communicator, optimizer: Optimizer) -> None:
        self._communicator = communicator
        self._optimizer = optimizer

    def any_trains(self, *, trains: bool) -> bool:
        """Whether some rank has a batch in this step. Raises as `allreduce`."""
        groups = self._optimizer.param_groups  # load_state_dict replaces them
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
