"""Scripts that save, load, reset or copy an optimizer's state."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.training import (
    Job,
    Topology,
    adam,
    assert_as_torch,
    batches,
    mlp,
    momentum,
    step,
    topologies,
    values,
)

Saved = dict[str, Any]


def trained_before() -> Saved:
    """A checkpoint of torch's own training, of the kind that scripts save under DistributedDataParallel."""
    model = mlp()
    optimizer = adam(model)
    for batch in batches(steps=3):
        step(Job(None), model, optimizer, batch)
    return {
        "model": {f"module.{name}": one.clone() for name, one in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }


def load_model(model: nn.Module, saved: Saved) -> None:
    model.load_state_dict({name.removeprefix("module."): one for name, one in saved["model"].items()})


def moments(optimizer: Optimizer) -> list[Tensor]:
    """Adam's state in the order of `state_dict`."""
    state = optimizer.state_dict()["state"]
    return [one[name] for _, one in sorted(state.items()) for name in ("step", "exp_avg", "exp_avg_sq")]


@topologies()
def test_a_checkpoint_is_loaded_before_the_optimizer_is_wrapped(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        saved, model = trained_before(), mlp()
        load_model(model, saved)
        inner = adam(model)
        inner.load_state_dict(saved["optimizer"])
        optimizer = job.wrap(inner, model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_checkpoint_is_loaded_after_the_optimizer_was_wrapped(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        saved, model = trained_before(), mlp()
        optimizer = job.wrap(adam(model), model)
        load_model(model, saved)
        optimizer.load_state_dict(saved["optimizer"])
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_only_rank_0_has_the_checkpoint(topology: Topology) -> None:
    """As `hvd.broadcast_optimizer_state`: what rank 0 loaded is everybody's."""

    def script(job: Job) -> list[Tensor]:
        saved, model = trained_before(), mlp()
        inner = adam(model)
        if 0 in job.ranks:
            load_model(model, saved)
            inner.load_state_dict(saved["optimizer"])
        optimizer = job.wrap(inner, model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="state")


@topologies()
def test_a_saved_state_is_torchs_own(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        plain = adam(model)
        plain.load_state_dict(torch.load(file))
        return [*values(model), *moments(plain)]

    assert_as_torch(topology, script)


@topologies()
def test_model_and_optimizer_are_rolled_back(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        first, *rest = batches()
        step(job, model, optimizer, first)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for _ in range(2):
            for batch in rest:
                step(job, model, optimizer, batch)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        step(job, model, optimizer, first)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_an_optimizer_is_pickled_as_a_whole(topology: Topology) -> None:
    """A refusal names `state_dict`."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return moments(pickle.loads(pickle.dumps(optimizer)))

    assert_as_torch(topology, script, refusal="state_dict")


@topologies()
def test_an_optimizer_is_copied(topology: Topology) -> None:
    """A refusal names `state_dict`."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return moments(copy.deepcopy(optimizer))

    assert_as_torch(topology, script, refusal="state_dict")


@topologies()
def test_the_state_is_cleared_for_a_restart(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        for turn, batch in enumerate(batches()):
            if turn == 2:
                optimizer.state.clear()
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="state")


@topologies()
def test_moments_are_scaled_in_place(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)
        return values(model)

    assert_as_torch(topology, script, refusal="state")


@topologies()
def test_moments_are_read_after_each_step(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        norms = []
        for batch in batches():
            step(job, model, optimizer, batch)
            norms += [optimizer.state[one]["momentum_buffer"].norm() for one in model.parameters()]
        return norms

    assert_as_torch(topology, script, refusal="state")


@topologies()
def test_a_saved_part_of_a_model_is_no_larger_than_it(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
        job.wrap(momentum(model), model, bucket_bytes=1 << 20)
        file = io.BytesIO()
        torch.save(model[1].state_dict(), file)
        return [torch.tensor(file.tell() < 10_000)]

    assert_as_torch(topology, script)


@topologies()
@pytest.mark.parametrize("whole", [True, False], ids=["model", "state"])
def test_a_model_is_saved_and_loaded_again(topology: Topology, whole: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        file = io.BytesIO()
        torch.save(model if whole else model.state_dict(), file)
        file.seek(0)
        if whole:
            again = torch.load(file, weights_only=False)
        else:
            again = mlp()
            again.load_state_dict(torch.load(file))
        own = momentum(again)
        step(Job(None), again, own, batches()[0])
        return [*values(model), *values(again)]

    assert_as_torch(topology, script)
