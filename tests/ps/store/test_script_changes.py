"""Which ranks of a round must agree on what scripts changed before it."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.core.messages import Delivery, Push, Refusal, Values, WriteParameters
from hubring.ps.store.consistency import BSP
from tests.support.store import (
    ADD,
    MOMENTUM,
    answered,
    hub,
    load,
    parameters,
    push,
    sender,
    state,
    view,
    write,
)


@pytest.mark.parametrize("loads", [False, True])
def test_a_worker_that_joins_between_two_steps_agrees_with_the_others(loads: bool) -> None:
    store = hub(BSP(), 2)
    for rank in range(2):
        store.handle(push(rank, 0), rank)
    store.on_view(view(2, sender(0)))
    store.handle(load(0, 1, 10.0) if loads else write(0, 1, 7.0), "w")
    store.on_view(view(3, sender(0), sender(1, life=2)))

    def step(clock: int) -> list[Delivery]:
        gradient = Push(sender(1, 2), 0, clock, torch.ones(4), MOMENTUM if loads else ADD)
        return [
            *store.handle(push(0, clock, hyper=MOMENTUM if loads else ADD), "a"),
            *store.handle(gradient, "b"),
        ]

    assert [type(reply) for _, reply in step(1)] == [Values, Values]
    if loads:
        assert state(store) == {"momentum_buffer": [10.0] * 4}
    else:
        assert parameters(store).tolist() == [8.0] * 4
    store.handle(load(0, 2, 10.0) if loads else write(0, 2, 7.0), "w")
    assert [type(reply) for _, reply in step(2)] == [Refusal, Refusal], "from its second step on it counts"


def test_the_writes_of_a_late_worker_must_agree() -> None:
    store = hub(BSP(), 2)
    store.on_view(view(2, sender(0)))
    store.on_view(view(3, sender(0), sender(1, life=2)))
    store.handle(WriteParameters(sender(1, 2), 0, 0, 0, torch.ones(4)), "w")
    store.handle(push(0, 0), "a")
    deliveries = store.handle(Push(sender(1, 2), 0, 0, torch.ones(4), ADD), "b")
    assert [type(reply) for _, reply in deliveries] == [Refusal, Refusal]


def test_a_rank_without_any_gradient_agrees_with_the_others() -> None:
    store = hub(BSP(), 2)
    store.handle(write(0, 0, 7.0), "w")
    store.handle(push(0, 0), "a")
    deliveries = store.handle(Push(sender(1), 0, 0, torch.zeros(4), ADD, (0,)), "b")
    assert answered(deliveries) == ["a", "b"]
    assert parameters(store).tolist() == [7.5] * 4


def test_ranks_must_agree_on_parameters_that_no_rank_has_a_gradient_for() -> None:
    store = hub(BSP(), 2)
    store.handle(write(0, 0, 7.0), "w")
    for rank in range(2):
        deliveries = store.handle(Push(sender(rank), 0, 0, torch.zeros(4), ADD, (0,)), rank)
    assert [type(reply) for _, reply in deliveries] == [Refusal, Refusal]
