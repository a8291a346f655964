"""The wrapped optimizer is an optimizer as any other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.training_scripts import batches, build, plain_step, sgd, single_server, wrap


def test_the_wrapped_optimizer_shares_its_state_with_the_inner_one() -> None:
    model = build()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = alone(inner, model)
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
    optimizer = alone(inner, model)
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


class KerasLike:
    """Has hyperparameters, and no groups."""

    learning_rate = 0.1


def alone(*given: Any, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(*given, communicator=LocalCommunicator(), **options)


def copied(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(one.detach().clone()) for one in model.parameters()])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model: alone(torch.optim.SGD, model), r"is the class SGD, .*: make one, as in SGD\(model"),
        (lambda model: alone([sgd(model)], model), r"is a list, .*: make a DistributedOptimizer for each"),
        (lambda model: alone(StepLR(sgd(model), 1), model), r"StepLR, .*: pass its attribute opt"),
        (lambda model: alone(model, model), r"Sequential, .*: call DistributedOptimizer\(optimizer, model\)"),
        (lambda model: alone(KerasLike(), model), r"KerasLike, .*, or a subclass of torch.optim.Optimizer;"),
        (lambda model: alone(None, model), r"NoneType, not a torch.optim.Optimizer"),
        (lambda model: alone(alone(sgd(model), model), model), "already a DistributedOptimizer"),
        (lambda model: alone(sgd(model), model.named_parameters()), r"a generator, not .*named_parameters="),
        (lambda model: alone(copied(model), model), r"such as float32 copies, pass .*named_parameters="),
        (lambda model: alone(sgd(model), model, named_parameters=[]), "leave the model out"),
        (lambda model: alone(sgd(model), named_parameters=dict(model.named_parameters())), "not a pair of a"),
        (lambda model: alone(sgd(model), named_parameters=[*model.parameters()]), "not a pair of a name and"),
        (lambda model: alone(sgd(model), cross_barrier=True), "needs the model"),
    ],
)
def test_a_wrong_call_is_refused_with_what_to_pass(call: Callable[[nn.Module], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        call(build())


@pytest.mark.slow
def test_a_ddp_model_of_before_the_first_use_of_hubring_is_found() -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 1)
class OfTheScript(torch.nn.parallel.DistributedDataParallel):
    pass
parallel = OfTheScript(model)
from hubring.workers.optimizer.model_checks import check_averaging
check_averaging(torch.nn.Module(), model.parameters())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: the model is in a DistributedDataParallel, which averages" in ended.stderr


def test_an_optimizer_that_the_hub_cannot_run_is_refused_at_once() -> None:
    model = build()
    with pytest.raises(ConfigError, match="Adadelta"):
        DistributedOptimizer(torch.optim.Adadelta(model.parameters()), model, communicator=single_server())
    alone(torch.optim.Adadelta(model.parameters()), model)


def test_another_optimizer_of_the_same_name_is_not_taken_for_torchs_on_the_hub() -> None:
    class SGD(torch.optim.SGD):
        """Steps in some way of its own."""

    model = build()
    with pytest.raises(ConfigError, match="the script's optimizer is tests"):
        wrap(model, single_server(), inner=SGD(model.parameters(), lr=0.1))
    wrap(model, LocalCommunicator(), inner=SGD(model.parameters(), lr=0.1))
