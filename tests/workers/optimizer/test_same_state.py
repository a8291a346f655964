"""Ranks whose optimizers begin with different state are refused, where workers step."""

from __future__ import annotations

import torch
from torch import nn

from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.rank_checks import check_same_state
from tests.support.training.ranks import RingRanks


class Foreign:
    """Looks different in each process."""


def test_state_that_is_no_tensor_or_number_may_differ() -> None:
    def check(communicator: Communicator) -> None:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.state[parameter] = {"made by": Foreign()}
        check_same_state(optimizer, communicator)

    RingRanks().run(check)
