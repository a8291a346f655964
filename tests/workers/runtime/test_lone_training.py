"""A script that trains without `DistributedOptimizer` gets a warning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hubring.workers.communicators.base import Communicator
from hubring.workers.runtime.training_record import look_for_lone_training


@pytest.mark.parametrize(
    ("trainers", "facts", "warned"),
    [
        ([], {}, True),
        (["DistributedOptimizer"], {}, False),
        ([], {"used": True}, False),  # it averages the gradients itself
        ([], {"size": 1}, False),
        ([], {"rank": 1}, False),
    ],
)
def test_only_training_without_an_exchange_is_warned_of(
    trainers: list[str], facts: dict[str, int], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1)).backward()
    optimizer.step()
    communicator = SimpleNamespace(**{"rank": 0, "size": 2, "used": False} | facts)
    look_for_lone_training(trainers, cast(Communicator, communicator))
    assert ("wrap the optimizer" in caplog.text) == warned
