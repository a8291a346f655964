"""Optimizers on the hub: their dtypes, and the options that they take and refuse."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.optim.block_optimizers import optimizer_for
from hubring.ps.optim.blocks import BlockSteps
from hubring.ps.optim.hyperparameters import hyper_of, kwargs_of
from tests.support.optimizers import CASES, hyper, random


@pytest.mark.parametrize(("name", "options"), CASES)
def test_hyperparameters_travel_as_numbers_and_come_back(name: str, options: dict[str, Any]) -> None:
    group = getattr(torch.optim, name)([torch.zeros(1)], lr=torch.tensor(0.5), **options).param_groups[0]
    hyper = hyper_of(group, name)
    assert all(type(value) is float for value in hyper.values())
    for option, value in kwargs_of(hyper, name).items():
        assert group[option] == value
        assert isinstance(value, bool) == isinstance(group[option], bool)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_float64_follows_the_float32_run(name: str, options: dict[str, Any]) -> None:
    group = getattr(torch.optim, name)([torch.zeros(1)], lr=0.05, **options).param_groups[0]
    optimizer, reference = optimizer_for(name), optimizer_for(name)
    values = random(3001, 0).double()
    expected = values.float()
    address = values.data_ptr()
    hyper = hyper_of(group, name)
    for seed in range(1, 4):
        kept = random(3001, seed).double()
        given = kept.clone()
        optimizer.step(values, [given], 1, hyper, torch.empty_like(given))
        reference.step(expected, [kept.float()], 1, hyper, torch.empty_like(expected))
        assert torch.equal(given, kept)
    assert (values.data_ptr(), values.grad) == (address, None)
    torch.testing.assert_close(values.float(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_options_that_cannot_travel_are_named(option: str) -> None:
    group = torch.optim.Adam([torch.zeros(1)]).param_groups[0]
    with pytest.raises(ConfigError, match=rf"Adam\({option}=True\)"):
        hyper_of({**group, option: True}, "Adam")


@pytest.mark.parametrize(
    "wrong",
    [{}, {"beta3": 1.0}, {"lr": nan}, {"lr": inf}, {"beta1": 1.0}, {"beta2": 1.1}, {"beta1": -0.1}],
)
def test_hyperparameters_that_no_step_could_use_are_refused(wrong: dict[str, float]) -> None:
    hyper = hyper_of(torch.optim.Adam([torch.zeros(1)]).param_groups[0], "Adam")
    fresh, used = (optimizer_for("Adam") for _ in range(2))
    used.check(hyper)
    for optimizer in (fresh, used):
        with pytest.raises(ConfigError, match="Adam got"):
            optimizer.check({**hyper, **wrong} if wrong else {})


def test_an_option_that_the_state_has_no_tensor_for_is_refused_as_torch_refuses_it() -> None:
    values, scratch = torch.ones(64), torch.empty(64)
    steps = BlockSteps("RMSprop", values, parameters=[slice(0, 32), slice(32, 64)])
    plain, momentum = hyper("RMSprop", {}), hyper("RMSprop", {"momentum": 0.9})
    steps.check(momentum)
    steps.step([torch.ones(64)], plain, scratch, absent=[0])
    with pytest.raises(ConfigError, match=r"got momentum=0\.9, but its state has no momentum_buffer"):
        steps.check(momentum)
    steps.check(plain)
    used = steps.state()
    steps.load(OptimizerState())
    steps.check(momentum)
    steps.load(used)
    with pytest.raises(ConfigError, match="its state has no momentum_buffer"):
        steps.check(momentum)
