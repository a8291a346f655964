"""Compressed gradients in a shard's store."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hubring.ps.core.messages import Code, Coded, Pull, Push, Transfer
from hubring.ps.shard.standby_stream import lasting
from hubring.ps.store.consistency import BSP
from tests.support.store import (
    ADD,
    coded,
    coded_push,
    decoded,
    hub,
    parameters,
    refusal_of,
    sender,
    values_of,
)


def test_an_averaging_hub_answers_in_the_codec_and_makes_up_for_what_it_left_out() -> None:
    store = hub(BSP(), 2, optimizer="", codec="topk:0.25")
    gradient = torch.tensor([3.0, 2.0, 0, 0])
    sums = torch.zeros(4)
    for clock in range(20):
        for rank in range(2):
            deliveries = store.handle(coded_push(rank, clock, gradient, hyper={}, name="topk:0.25"), rank)
        first, second = (values_of(reply).values for _, reply in deliveries)
        assert torch.equal(decoded(first), decoded(second))
        sums += decoded(first)
    # The workers here keep nothing back, so only their largest element is ever given.
    torch.testing.assert_close(sums, 20 * torch.tensor([3.0, 0, 0, 0]))


def test_before_the_first_round_an_averaging_hub_answers_zeros_in_the_codec() -> None:
    for name in ("bf16", "int8", "sign", "topk:0.25"):
        store = hub(BSP(), 1, optimizer="", numel=64, codec=name)
        ((_, reply),) = store.handle(Pull(sender(0), 0), "look")
        assert decoded(values_of(reply).values).tolist() == [0.0] * 64


def test_a_retry_is_answered_with_the_same_code() -> None:
    store = hub(BSP(), 1, optimizer="", codec="sign", numel=64)
    push_ = coded_push(0, 0, torch.arange(64.0), hyper={}, name="sign")
    ((_, before),) = store.handle(push_, "first")
    code = decoded(values_of(before).values)
    ((_, again),) = store.handle(push_, "second")
    assert torch.equal(decoded(values_of(again).values), code)
    assert store.stats().duplicates == 1


def test_what_waits_for_a_standby_does_not_change_with_the_next_round() -> None:
    store = hub(BSP(), 1, optimizer="", codec="sign", numel=64)
    (transfer, *_) = store.transfer()
    ((_, reply),) = store.handle(Pull(sender(0), 0), "a")
    held = values_of(lasting(replace(values_of(reply), stable=False)))
    store.handle(coded_push(0, 0, torch.ones(64), hyper={}, name="sign"), "b")
    assert isinstance(transfer, Transfer)
    assert not transfer.tensors["code"].any()
    assert not decoded(held.values).any()


@pytest.mark.parametrize(
    ("codec", "gradient", "says"),
    [
        ("int8", torch.ones(4), "expects gradients in int8, got an uncompressed gradient"),
        ("", coded(torch.ones(4)), "expects uncompressed gradients, got a gradient in int8"),
        ("bf16", coded(torch.ones(4)), "expects gradients in bf16, got a gradient in int8"),
        ("int8", coded(torch.ones(5)), "expects float32[4], got float32[5] in int8"),
        ("int8", coded(torch.ones(4).double()), "got float64[4] in int8"),
    ],
)
def test_a_gradient_in_another_codec_or_size_is_refused(
    codec: str, gradient: Tensor | Coded, says: str
) -> None:
    store = hub(BSP(), 1, codec=codec)
    refusal = refusal_of(store.handle(Push(sender(0), 0, 0, gradient, ADD), "p"))
    assert refusal.code is Code.WRONG_SIZE
    assert says in refusal.text
    assert parameters(store).tolist() == [0.0] * 4
