"""Ranks whose optimizers begin with different state are refused, where workers step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.rank_checks import check_same_state
from tests.support.training.ranks import RingRanks


class Foreign:
    """Looks different in each process."""


def stepped(loss: float) -> torch.optim.Optimizer:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, loss)
    optimizer.step()
    return optimizer


def test_state_that_is_no_tensor_or_number_may_differ() -> None:
    def check(communicator: Communicator) -> None:
        optimizer = stepped(1.0)
        for state in optimizer.state.values():
            state["made by"] = Foreign()
        check_same_state(optimizer, communicator)

    RingRanks().run(check)


def test_the_first_difference_and_its_ranks_are_named() -> None:
    def check(communicator: Communicator) -> None:
        optimizer = stepped(1.0)
        if communicator.rank == 2:
            optimizer.state[optimizer.param_groups[0]["params"][1]]["momentum_buffer"] += 1
        with pytest.raises(
            ConfigError, match=r"rank 0 and rank 2 .* state\[1\]\[momentum_buffer\] float32\[1\]"
        ):
            check_same_state(optimizer, communicator)

    RingRanks().run(check)
