"""NaN and infinity: what a hub refuses, whom it names, and what it lets through."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hubring.ps.core.messages import Code, Delivery, Pull, Refusal
from hubring.ps.optim import blocks
from hubring.ps.store.consistency import BSP
from hubring.ps.store.store import KVStore
from tests.support.store import coded_push, hub, push, sender, values_of

NAN = torch.tensor([1.0, math.nan, 1.0, math.nan])
LARGEST = torch.finfo(torch.float32).max


def refusals_of(deliveries: list[Delivery]) -> set[str]:
    texts = set()
    for _, reply in deliveries:
        assert isinstance(reply, Refusal), reply
        assert reply.code is Code.NOT_FINITE
        texts.add(reply.text)
    return texts


def values(store: KVStore, key: int = 0) -> list[float]:
    return list(store._entries[key].values.tolist())


def test_gradients_of_which_only_the_sum_is_infinite_are_refused_as_such() -> None:
    store = hub(BSP(), 2)
    store.handle(push(0, 0, torch.full((4,), LARGEST)), "a")
    (text,) = refusals_of(store.handle(push(1, 0, torch.full((4,), LARGEST)), "b"))
    assert "ranks 0, 1 are finite in step 1, but their sum overflows float32 in weight [4]" in text


def test_a_hub_that_is_told_to_allow_them_applies_them() -> None:
    store = hub(replace(BSP(), finite=False), 1)
    ((_, reply),) = store.handle(push(0, 0, NAN), "a")
    taken = values_of(reply).values
    assert isinstance(taken, Tensor)
    assert taken.isnan().tolist() == [False, True, False, True]


@pytest.mark.parametrize("codec", ["int8", "sign", "topk:0.25", "fp16"])
def test_compressed_gradients_are_refused_too(codec: str) -> None:
    store = hub(BSP(), 2, numel=64, codec=codec)
    bad = torch.ones(64)
    bad[40] = math.nan
    store.handle(coded_push(0, 0, torch.ones(64), name=codec), "a")
    (text,) = refusals_of(store.handle(coded_push(1, 0, bad, name=codec), "b"))
    assert "the gradient of rank 1 is not finite" in text
    assert ("65504" in text) is (codec == "fp16")
    assert values(store) == [0.0] * 64


def test_a_slice_of_several_blocks_is_never_saved_half_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8)
    store = hub(BSP(), 1)
    refusals_of(store.handle(push(0, 0, torch.tensor([1.0, 1.0, math.nan, 1.0])), "a"))
    assert values(store) == [1.0, 1.0, 0.0, 0.0]
    assert "in the middle of a step" in store.unsound


def test_the_first_cause_counts() -> None:
    store = hub(BSP(), 1)
    refusals_of(store.handle(push(0, 0, NAN), "a"))
    store.fail("the others left")
    assert len(refusals_of(store.handle(Pull(sender(0), 0), "b"))) == 1
