"""The wrapped optimizer is an optimizer as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.training_scripts import batches, build, plain_step, sgd, single_server, wrap


def test_the_wrapped_optimizer_shares_its_state_with_the_inner_one() -> None:
    model = build()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model, communicator=LocalCommunicator())
    assert isinstance(optimizer, torch.optim.Adam)
    plain_step(model, optimizer, batches()[0])
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer).startswith("DistributedOptimizer(Adam (")


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


def test_an_optimizer_is_not_wrapped_twice() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator())
    with pytest.raises(ConfigError, match="already a DistributedOptimizer"):
        DistributedOptimizer(optimizer, model, communicator=LocalCommunicator())


class KerasLike:
    """Has hyperparameters, and no groups."""

    learning_rate = 0.1


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda model: torch.optim.SGD,
            r"is the class SGD, .*: make one, as in SGD\(model.parameters\(\), lr",
        ),
        (lambda model: [sgd(model)], r"is a list, .*: make a DistributedOptimizer for each optimizer in it"),
        (lambda model: torch.optim.lr_scheduler.StepLR(sgd(model), 1), r"StepLR, .*: pass its attribute opt"),
        (lambda model: model, r"Sequential, .*: call DistributedOptimizer\(optimizer, model\), the opt"),
        (lambda model: KerasLike(), r"KerasLike, .*, or a subclass of torch.optim.Optimizer; for the"),
        (lambda model: None, r"NoneType, not a torch.optim.Optimizer"),
    ],
    ids=["class", "list", "scheduler", "model", "other", "none"],
)
def test_what_is_no_optimizer_is_named_with_what_to_pass(make: Callable[[nn.Module], Any], told: str) -> None:
    model = build()
    with pytest.raises(ConfigError, match=f"the optimizer .*{told}"):
        DistributedOptimizer(make(model), model, communicator=LocalCommunicator())


@pytest.mark.parametrize("kind", [dict, lambda pairs: [one for _, one in pairs]], ids=["dict", "list"])
def test_named_parameters_that_are_no_pairs_are_refused(kind: Callable[..., Any]) -> None:
    model = build()
    with pytest.raises(ConfigError, match="not a pair of a name and a parameter"):
        DistributedOptimizer(
            sgd(model), named_parameters=kind(model.named_parameters()), communicator=LocalCommunicator()
        )


def test_parameters_that_the_model_does_not_have_are_passed_by_name_without_it() -> None:
    model = build()
    copies = [nn.Parameter(one.detach().clone()) for one in model.parameters()]
    with pytest.raises(ConfigError, match=r"such as float32 copies, pass .*named_parameters="):
        DistributedOptimizer(torch.optim.SGD(copies), model, communicator=LocalCommunicator())
    with pytest.raises(ConfigError, match="leave the model out"):
        DistributedOptimizer(sgd(model), model, named_parameters=[], communicator=LocalCommunicator())


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
    with pytest.raises(ConfigError, match="the script's optimizer is tests"):
        wrap(model, single_server(), inner=SGD(model.parameters(), lr=0.1))
    wrap(model, LocalCommunicator(), inner=SGD(model.parameters(), lr=0.1))
