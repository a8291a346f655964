"""The wrapped optimizer is an optimizer as any other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.training_scripts import (
    assert_same,
    batches,
    build,
    parameters_of,
    plain_step,
    sgd,
    single_server,
    wrap,
)


def test_it_is_an_optimizer_that_shares_everything_with_the_wrapped_one() -> None:
    model = build()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model, communicator=LocalCommunicator())
    assert isinstance(optimizer, torch.optim.Optimizer)
    plain_step(model, optimizer, batches()[0])
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer).startswith("DistributedOptimizer(Adam (")


def test_its_state_can_be_loaded_into_another() -> None:
    def adam(model: nn.Module) -> DistributedOptimizer:
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        return DistributedOptimizer(inner, model, communicator=LocalCommunicator())

    first, second = build(), build()
    optimizer, resumed = adam(first), adam(second)
    begin, *rest = batches()
    plain_step(first, optimizer, begin)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in rest:
        plain_step(first, optimizer, batch)
        plain_step(second, resumed, batch)
    assert_same(parameters_of(first), parameters_of(second))


def test_state_is_saved_from_and_loaded_into_the_hub() -> None:
    model = build()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    plain_step(model, inner, batches()[0])
    saved = copy.deepcopy(inner.state_dict())
    rank = single_server()
    optimizer = DistributedOptimizer(inner, model, communicator=rank)
    assert not optimizer.state, "the hub begins with it, so that it is not here"
    optimizer.load_state_dict(saved)
    assert rank.hub.state.keys() == dict(model.named_parameters()).keys()
    found = optimizer.state_dict()
    assert not optimizer.state
    torch.testing.assert_close(found, saved)


def test_step_hooks_and_state_dict_hooks_are_called_once() -> None:
    model = build()
    inner = sgd(model)
    optimizer = DistributedOptimizer(inner, model, communicator=LocalCommunicator())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    plain_step(model, optimizer, batches()[0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "state", "load"]


def test_a_group_with_a_parameter_that_the_model_lacks_is_not_added() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    with pytest.raises(ConfigError, match="parameters that the model does not have"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1


def test_it_is_not_wrapped_twice() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator())
    with pytest.raises(ConfigError, match="already a DistributedOptimizer"):
        DistributedOptimizer(optimizer, model, communicator=LocalCommunicator())


def test_a_model_that_is_none_is_refused_with_the_call_that_was_meant() -> None:
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"a generator, not .*named_parameters="):
        DistributedOptimizer(inner, model.named_parameters(), communicator=LocalCommunicator())  # type: ignore[arg-type]


def test_an_optimizer_that_the_hub_cannot_run_is_refused_at_once() -> None:
    model = build()
    with pytest.raises(ConfigError, match="Adadelta"):
        DistributedOptimizer(torch.optim.Adadelta(model.parameters()), model, communicator=single_server())
    DistributedOptimizer(torch.optim.Adadelta(model.parameters()), model, communicator=LocalCommunicator())


def test_another_optimizer_of_the_same_name_is_not_taken_for_torchs_on_the_hub() -> None:
    class SGD(torch.optim.SGD):
        """Steps in some way of its own."""

    model = build()
    with pytest.raises(ConfigError, match="--aggregate"):
        wrap(model, single_server(), inner=SGD(model.parameters(), lr=0.1))
    wrap(model, LocalCommunicator(), inner=SGD(model.parameters(), lr=0.1))


def test_a_group_of_frozen_parameters_alone_changes_nothing() -> None:
    model = build()
    frozen, *rest = model.parameters()
    frozen.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": [frozen], "lr": 0.5}, {"params": rest}]
    optimizer = wrap(model, single_server(), inner=torch.optim.SGD(groups, lr=0.1))
    before = frozen.clone()
    plain_step(model, optimizer, batches()[0])
    assert torch.equal(frozen, before)
    assert optimizer.completed_steps == 1


def test_a_model_that_was_converted_is_found_out_in_step() -> None:
    model = build()
    optimizer = wrap(model, single_server(), overlap=False)
    plain_step(model, optimizer, batches()[0])
    model.double()
    with pytest.raises(ConfigError, match=r"parameter .* was moved or converted"):
        plain_step(model, optimizer, batches()[1].double())
