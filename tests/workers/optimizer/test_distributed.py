"""The wrapped optimizer trains as torch's, and exchanges when it may."""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext

import pytest
import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from tests.support.training.ranks import StagedRanks
from tests.support.training.training_scripts import (
    STEPS,
    Step,
    batches,
    build,
    clipped_step,
    closure_step,
    late_lr_step,
    loss_of,
    module_zero_step,
    never_zeroing_step,
    new_scaler,
    number_of_buckets,
    plain_step,
    pushes_during_backward,
    replacing_step,
    scaled_step,
    single_server,
    wrap,
)


@pytest.mark.parametrize("step", [plain_step, module_zero_step, closure_step, never_zeroing_step])
def test_after_a_watched_first_step_a_hub_gets_gradients_during_backward(step: Step) -> None:
    buckets = number_of_buckets()
    assert buckets > 2
    assert pushes_during_backward(step, single_server()) == [0, *[buckets] * (STEPS - 1)]


@pytest.mark.parametrize("step", [clipped_step, replacing_step, late_lr_step, scaled_step(new_scaler())])
def test_a_script_that_changes_gradients_has_them_exchanged_in_step(
    step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert pushes_during_backward(step, single_server()) == [0] * STEPS
    (line,) = [record.message for record in caplog.records if "exchanged in step()" in record.message]
    assert "backward and step" in line or "uses a GradScaler" in line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_fused_sgd_that_steps_no_half_precision_is_refused_where_workers_step(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(64, 1, bias=False, dtype=dtype)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    before, model.weight.grad = model.weight.detach().clone(), torch.ones(1, 64, dtype=dtype)
    inner.step()
    wrong = torch.equal(model.weight, before)
    with pytest.raises(ConfigError, match="use fused=False, or let a hub step") if wrong else nullcontext():
        wrap(model, LocalCommunicator(), inner=inner)
    wrap(model, single_server(), inner=inner)


def test_on_a_gpu_a_change_that_torch_does_not_count_is_refused_in_the_next_step() -> None:
    def action(communicator: Communicator) -> None:
        model = build()
        optimizer = wrap(model, communicator)
        for step, batch in enumerate(batches()):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            for gradient in (parameter.grad for parameter in model.parameters() if step == 2):
                assert gradient is not None
                gradient.data.mul_(0.5)
            with pytest.raises(ConfigError, match="changes gradients") if step == 3 else nullcontext():
                optimizer.step()

    with closing(StagedRanks()) as ranks:
        ranks.run(action)


def test_without_overlap_a_hub_gets_gradients_in_step() -> None:
    assert pushes_during_backward(plain_step, single_server(), overlap=False) == [0] * STEPS


@pytest.mark.parametrize(
    ("step", "match"),
    [(clipped_step, r"clipping.*overlap=False"), (scaled_step(new_scaler()), r"GradScaler.*overlap=False")],
    ids=["clipping", "scaler"],
)
def test_what_begins_after_the_first_step_is_an_error_with_the_fix(step: Step, match: str) -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    with pytest.raises(ConfigError, match=match):
        step(model, optimizer, second)


def test_hyperparameters_that_change_after_the_push_are_refused_at_every_step() -> None:
    rank, model = single_server(), build()
    optimizer = wrap(model, rank)
    plain_step(model, optimizer, batches()[0])
    loss_of(model, batches()[1]).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"hyperparameters between the start of backward and step"):
            optimizer.step()
    assert optimizer.completed_steps == 1
    assert all(hyper["lr"] == 0.1 for hyper in rank.hypers)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
