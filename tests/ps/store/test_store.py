"""One shard's state machine in lockstep, fed with schedules of messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from hubring.ps.core.messages import Code, Init, Pull
from hubring.ps.store.consistency import BSP, SSP
from tests.support.store import (
    MOMENTUM,
    answered,
    hub,
    parameters,
    push,
    refusal_of,
    sender,
    values_of,
)


def test_pulls_wait_for_the_first_values_and_a_second_init_is_ignored() -> None:
    store = hub(BSP(), 2, initialise=False)
    assert store.handle(Pull(sender(0), 0), "a") == []
    assert store.handle(Pull(sender(1), 0), "b") == []
    assert store.handle(Pull(sender(1), 0), "b again") == []
    deliveries = store.handle(Init(sender(0), 0, torch.full((4,), 7.0)), "init")
    assert answered(deliveries) == ["init", "a", "b", "b again"]
    assert values_of(deliveries[1].reply).clock == 0
    store.handle(Init(sender(1), 0, torch.zeros(4)), "late init")
    assert torch.equal(parameters(store), torch.full((4,), 7.0))


def test_a_push_before_the_first_values_is_refused() -> None:
    refusal = refusal_of(hub(BSP(), 1, initialise=False).handle(push(0, 0), "p"))
    assert refusal.code is Code.BAD_REQUEST
    assert "key 0 has no values yet" in refusal.text


# BSP.


def test_bsp_is_bitwise_the_same_for_every_order_of_arrival() -> None:
    def run(orders: Iterable[tuple[int, ...]]) -> Tensor:
        store = hub(BSP(), 4, numel=50)
        for clock, order in enumerate(orders):
            for rank in order:
                generator = torch.Generator().manual_seed(100 * clock + rank)
                gradient = torch.randn(50, generator=generator) * 10**rank
                store.handle(push(rank, clock, gradient, hyper=MOMENTUM), rank)
        return parameters(store)

    expected = run([(0, 1, 2, 3)] * 3)
    for order in itertools.permutations(range(4)):
        assert torch.equal(run([order, order[::-1], order]), expected)


# Retries: test_store_schedules has any schedule of them.


def test_a_clock_beyond_the_expected_one_is_out_of_order() -> None:
    refusal = refusal_of(hub(BSP(), 2).handle(push(0, 3), "p"))
    assert refusal.code is Code.OUT_OF_ORDER
    assert "at clock 3, expected clock 0" in refusal.text


def test_a_worker_that_does_not_wait_for_its_read_is_out_of_order() -> None:
    store = hub(SSP(0), 2)
    assert store.handle(push(0, 0), "blocked") == []
    assert refusal_of(store.handle(push(0, 1), "too soon")).code is Code.OUT_OF_ORDER
    assert parameters(store).tolist() == [1.0] * 4
