"""The private names of torch and CPython still mean what the exchange takes them for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hubring.workers.buckets import torch_internals


def test_a_backward_has_a_number_and_calls_back_before_it_returns() -> None:
    seen: list[object] = []
    parameter = nn.Parameter(torch.ones(2))

    def accumulated(_: torch.Tensor) -> None:
        seen.append(torch_internals.graph_task())
        torch_internals.when_backward_ends(partial(seen.append, "end"))

    parameter.register_post_accumulate_grad_hook(accumulated)
    for _ in range(2):
        parameter.sum().backward()
    first, end, second, again = seen
    assert end == again == "end"
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert -1 < first < second
    assert torch_internals.graph_task() == -1


def test_versions_count_in_place_changes_and_views_share_them() -> None:
    tensor = torch.zeros(4)
    view, before = tensor[:2], torch_internals.version(tensor)
    view.add_(1)
    assert torch_internals.version(tensor) == torch_internals.version(view) == before + 1
    tensor.data.add_(1)
    assert torch_internals.version(tensor) == before + 1


def test_references_and_users_tell_what_a_script_keeps() -> None:
    tensor = torch.zeros(4)
    references, users = torch_internals.references(tensor), torch_internals.storage_users(tensor)
    kept = tensor
    assert torch_internals.references(kept) == references + 1
    view = tensor[:2]
    assert torch_internals.storage_users(tensor) == users + 1
    del view
    assert torch_internals.storage_users(tensor) == users


def test_the_last_hook_of_a_gradient_is_known_by_its_number() -> None:
    parameter = nn.Parameter(torch.ones(2))
    first, second = (parameter.register_post_accumulate_grad_hook(lambda _: None) for _ in range(2))
    assert not torch_internals.is_last_gradient_hook(parameter, first.id)
    assert torch_internals.is_last_gradient_hook(parameter, second.id)


def test_code_around_an_optimizers_step_is_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not torch_internals.has_step_hooks(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    assert not torch_internals.runs_before_step(optimizer), "a scheduler only counts"
    order: list[str] = []
    optimizer.register_step_post_hook(lambda *_: order.append("script"))
    handle = optimizer.register_step_post_hook(lambda *_: order.append("ours"))
    torch_internals.run_first_after_step(optimizer, handle.id)
    optimizer.step()
    assert order == ["ours", "script"]
    assert torch_internals.has_step_hooks(optimizer)
    assert not torch_internals.runs_before_step(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert torch_internals.runs_before_step(optimizer)
    torch_internals.drop_step_hooks(optimizer)
    assert not torch_internals.has_step_hooks(optimizer)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_knows_of_a_step_that_was_noted() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    torch_internals.note_step(optimizer)
    scheduler.step()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:DeprecationWarning")
def test_traces_and_transforms_are_seen() -> None:
    seen: list[bool] = []

    def forward(batch: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.is_traced() or torch_internals.is_functorch_tensor(batch))
        return batch * 2

    forward(torch.ones(2))
    torch.vmap(forward)(torch.ones(2))
    torch.jit.trace(forward, torch.ones(2))
    assert seen[:3] == [False, True, True]
