"""A script that keeps views of gradients has Hubring use other memory, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hubring.workers.communicators.base import Communicator
from tests.contract.awkward import (
    Aggregate,
    Hub,
    Ring,
    assert_as_one,
    batches,
    ends,
    layers,
    made,
    momentum,
    step,
    values,
)
from tests.support.training.ranks import Ranks

KINDS: dict[str, type[Ranks]] = {"hub": Hub, "aggregate": Aggregate, "ring": Ring}
CODECS = ["topk:0.3", "int8", "powersgd:1"]
CASES = [(name, codec) for name in KINDS for codec in CODECS if (name, codec) != ("hub", "powersgd:1")]
"""A hub that steps gets no factors."""


def compressing(kind: type[Ranks], codec: str) -> type[Ranks]:
    return type(kind.__name__, (kind,), {"compress": codec})


@pytest.mark.parametrize(("name", "codec"), CASES)
def test_a_script_that_keeps_views_of_gradients_keeps_its_residuals(name: str, codec: str) -> None:
    """One rank keeps views. If it lost its residuals, its part would count differently."""

    def training(keeps: bool) -> Callable[[Communicator | None], list[Tensor]]:
        def train(communicator: Communicator | None) -> list[Tensor]:
            assert communicator is not None
            model = layers()
            optimizer = momentum(model, communicator)
            for _ in range(3):
                for batch in batches():
                    step(model, optimizer, batch, communicator)
                    if keeps and communicator.rank == 1:
                        kept = [one.grad.view(-1) for one in model.parameters() if one.grad is not None]
                        assert kept
            return values(model)

        return train

    ranks = compressing(KINDS[name], codec)
    for one, other in zip(ends(ranks, training(True)), ends(ranks, training(False)), strict=True):
        assert torch.equal(one, other)


def test_buckets_that_travel_joined_move_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.workers.optimizer.parameters.BUCKET_BYTES", 64)

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, bucket_bytes=None)
        for batch in batches():
            step(model, optimizer, batch, communicator)
            kept = [one.grad.view(-1) for one in model.parameters() if one.grad is not None]
            assert kept
        return values(model)

    assert_as_one(Ring, train)


@pytest.mark.parametrize("codec", CODECS)
def test_a_second_optimizers_gradients_move_apart_from_the_firsts(codec: str) -> None:
    def training(keeps: bool) -> Callable[[Communicator | None], list[Tensor]]:
        def train(communicator: Communicator | None) -> list[Tensor]:
            models = [made(nn.Linear(4, 4)) for _ in range(2)]
            optimizers = [momentum(model, communicator) for model in models]
            for batch in batches():
                for model, optimizer in zip(models, optimizers, strict=True):
                    step(model, optimizer, batch, communicator)
                if keeps:
                    kept = [one.grad.view(-1) for one in models[1].parameters() if one.grad is not None]
                    assert kept
            return [tensor for model in models for tensor in values(model)]

        return train

    ranks = compressing(Aggregate, codec)
    for one, other in zip(ends(ranks, training(True)), ends(ranks, training(False)), strict=True):
        assert torch.equal(one, other)
