"""The private names of torch and CPython still mean what the exchange takes them for.

The tests of training scripts claim the other names.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hubring.ps.core import torch_internals


def test_users_of_a_storage_tell_what_a_script_keeps() -> None:
    tensor = torch.zeros(4)
    users = torch_internals.storage_users(tensor)
    view = tensor[:2]
    assert torch_internals.storage_users(tensor) == users + 1
    del view
    assert torch_internals.storage_users(tensor) == users


def test_our_code_runs_first_after_an_optimizers_step_until_hooks_are_dropped() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    order: list[str] = []
    optimizer.register_step_post_hook(lambda *_: order.append("script"))
    handle = optimizer.register_step_post_hook(lambda *_: order.append("ours"))
    torch_internals.run_first_after_step(optimizer, handle.id)
    optimizer.step()
    torch_internals.drop_step_hooks(optimizer)
    optimizer.step()
    assert order == ["ours", "script"]


@pytest.mark.filterwarnings("error")
def test_a_scheduler_knows_of_a_step_that_was_noted() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    torch_internals.note_step(optimizer)
    scheduler.step()
