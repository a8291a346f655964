"""A key of half precision is stepped in float32: its values are those of its master, rounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hubring.ps.core.messages import ReadState, StateReply, WriteState
from hubring.ps.core.optimizer_state import MASTER, OptimizerState
from hubring.ps.store.consistency import BSP
from hubring.ps.store.store import KVStore
from tests.support.optimizers import hyper, random, torchs
from tests.support.store import hub, parameters, push, refusal_of, sender, snapshot_of, write

pytestmark = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)

NUMEL, RANKS = 8, 2
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {}, "Adam": {"weight_decay": 0.1}}


def made(dtype: torch.dtype, name: str, *, initialise: bool = True) -> KVStore:
    kind = str(dtype).removeprefix("torch.")
    return hub(BSP(), RANKS, numel=NUMEL, optimizer=name, dtype=kind, parameters=2, initialise=initialise)


def train(store: KVStore, dtype: torch.dtype, name: str, first: int, last: int, **how: Any) -> list[Tensor]:
    """Takes steps with a small rate; returns the mean gradients."""
    means, options = [], {**hyper(name, OPTIONS[name]), "lr": 1e-4}
    for clock in range(first, last):
        given = [random(NUMEL, 10 * clock + rank, dtype) for rank in range(RANKS)]
        for rank, gradient in enumerate(given):
            store.handle(replace(push(rank, clock, gradient, hyper=options), **how), rank)
        means.append((given[0].float() + given[1].float()) / RANKS)
    return means


def stepped(values: Tensor, means: list[Tensor], name: str) -> Tensor:
    """Returns what torch's optimizer makes of float32 values."""
    parameter = torch.nn.Parameter(values.clone())
    optimizer = torchs(name, [parameter], OPTIONS[name])
    optimizer.param_groups[0]["lr"] = 1e-4
    for parameter.grad in means:
        optimizer.step()
    return parameter.detach()


def state(store: KVStore) -> OptimizerState:
    ((_, reply),) = store.handle(ReadState(sender(0), 0), "look")
    assert isinstance(reply, StateReply)
    return reply.state


def load(clock: int, rank: int, held: OptimizerState) -> WriteState:
    return WriteState(sender(rank), 0, clock, 1, held)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_has_the_master(dtype: torch.dtype, name: str) -> None:
    store, restored = made(dtype, name), made(dtype, name, initialise=False)
    means = train(store, dtype, name, 0, 3)
    restored.restore(snapshot_of(store))
    means += train(restored, dtype, name, 3, 6)
    expected = stepped(torch.zeros(NUMEL), means, name)
    assert torch.equal(state(restored).tensors[MASTER], expected)
    assert torch.equal(parameters(restored), expected.to(dtype))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_from_before_there_was_a_master_is_its_start(dtype: torch.dtype, name: str) -> None:
    store, restored = made(dtype, name), made(dtype, name, initialise=False)
    train(store, dtype, name, 0, 3)
    snapshot = snapshot_of(store)
    old = snapshot[0].optimizer
    del old[MASTER]
    old |= {key: tensor.to(dtype) for key, tensor in old.items() if key != "step"}
    restored.restore(snapshot)
    assert torch.equal(parameters(restored), parameters(store))
    assert MASTER not in state(restored).tensors
    (mean,) = train(restored, dtype, name, 3, 4)
    if name == "SGD":
        expected = stepped(parameters(store).float(), [mean], name)
        assert torch.equal(state(restored).tensors[MASTER], expected)


def test_a_script_that_changes_some_elements_keeps_the_master_of_the_others(dtype: torch.dtype) -> None:
    store = made(dtype, "SGD")
    means = train(store, dtype, "SGD", 0, 2)
    held, changed = state(store).tensors[MASTER], parameters(store)
    changed[2:4] = 0.3
    for rank in range(RANKS):
        store.handle(write(rank, 2, changed), "w")
    means = train(store, dtype, "SGD", 2, 3)
    held[2:4] = changed[2:4].float()
    assert torch.equal(state(store).tensors[MASTER], stepped(held, means, "SGD"))


def test_a_state_that_is_read_and_loaded_changes_nothing(dtype: torch.dtype) -> None:
    calm, store = made(dtype, "Adam"), made(dtype, "Adam")
    for one in (calm, store):
        train(one, dtype, "Adam", 0, 2)
    held = state(store)
    assert {tensor.dtype for tensor in held.tensors.values()} == {torch.float32}
    for rank in range(RANKS):
        store.handle(load(2, rank, held), "w")
    for one in (calm, store):
        train(one, dtype, "Adam", 2, 4)
    assert torch.equal(state(store).tensors[MASTER], state(calm).tensors[MASTER])


def test_values_count_more_than_a_master_that_is_not_theirs(dtype: torch.dtype) -> None:
    store = made(dtype, "SGD")
    other = OptimizerState({MASTER: torch.full((NUMEL,), 5.0)})
    for rank in range(RANKS):
        store.handle(load(0, rank, other), "w")
    means = train(store, dtype, "SGD", 0, 1)
    assert torch.equal(state(store).tensors[MASTER], stepped(torch.zeros(NUMEL), means, "SGD"))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_parameter_without_a_gradient_has_no_master_of_its_own(dtype: torch.dtype, name: str) -> None:
    store = made(dtype, name)
    train(store, dtype, name, 0, 2, absent=(1,))
    held = state(store)
    assert held.fresh == (1,)
    assert held.tensors[MASTER][:4].ne(0).all()
    assert parameters(store)[4:].eq(0).all()


def test_a_mean_for_workers_that_step_is_rounded_once(dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    store, large = hub(BSP(), 3, optimizer="", dtype=kind), 2 / torch.finfo(dtype).eps
    for rank, number in enumerate((large, 1.0, 1.0)):  # each 1 alone would be lost
        store.handle(push(rank, 0, torch.full((4,), number, dtype=dtype), hyper={}), rank)
    assert torch.equal(parameters(store), torch.full((4,), (large + 2) / 3).to(dtype))


def test_a_state_of_a_third_dtype_is_refused(dtype: torch.dtype) -> None:
    store = made(dtype, "SGD")
    wrong = OptimizerState({"momentum_buffer": torch.zeros(NUMEL, dtype=torch.float64)})
    told = refusal_of(store.handle(load(0, 0, wrong), "w")).text
    assert "momentum_buffer has torch.float64, expected torch.float32" in told
