"""Hashes of samples: they follow inputs and labels, whichever rank has them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hubring.workers.audit.samples import SampleTap
from tests.support.compare.audited import small

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4


@pytest.fixture
def model() -> nn.Module:
    return small()


@pytest.fixture
def tap(model: nn.Module) -> Iterator[SampleTap]:
    with closing(SampleTap(model)) as tap:
        yield tap


def train(model: nn.Module, inputs: Tensor = INPUTS, labels: Tensor = LABELS) -> None:
    functional.cross_entropy(model(inputs), labels).backward()


def taken(tap: SampleTap) -> list[bytes]:
    found = tap.take(evaluates=False)
    return [found[place : place + 8] for place in range(0, len(found), 8)]


def test_parts_of_a_batch_have_the_hashes_of_the_whole(model: nn.Module, tap: SampleTap) -> None:
    train(model)
    whole = taken(tap)
    assert len(set(whole)) == 8
    train(model, INPUTS[::2], LABELS[::2])
    train(model, INPUTS[1::2], LABELS[1::2])
    assert sorted(taken(tap)) == sorted(whole)


def test_an_input_or_a_label_changes_the_hash_of_its_sample_alone(model: nn.Module, tap: SampleTap) -> None:
    train(model)
    whole = taken(tap)
    others, labels = INPUTS.clone(), LABELS.clone()
    others[2, 3] += 1e-6
    labels[5] = 0
    train(model, others, labels)
    changed = [
        number for number, (one, other) in enumerate(zip(whole, taken(tap), strict=True)) if one != other
    ]
    assert changed == [2, 5]


def test_only_what_backward_reaches_counts(model: nn.Module, tap: SampleTap) -> None:
    model(INPUTS)
    with torch.no_grad():
        model(INPUTS)
    train(copy.deepcopy(model))
    assert taken(tap) == []
    train(model)
    assert len(taken(tap)) == 8
    assert taken(tap) == []


@pytest.mark.parametrize("more", [torch.zeros(8, 0), torch.ones(8, 2, dtype=torch.complex64).conj()])
def test_unusual_inputs_do_not_disturb_the_script(more: Tensor) -> None:
    class Model(nn.Bilinear):
        def forward(self, inputs: Tensor, more: Tensor) -> Tensor:
            return super().forward(inputs, inputs).sum() + more.real.sum()

    model = Model(6, 6, 4)
    with closing(SampleTap(model)) as tap:
        model(INPUTS, more).backward()  # a model that returns its loss
        assert len(taken(tap)) == 8


def test_a_parameter_that_a_model_returns_keeps_no_hooks() -> None:
    class Model(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return super().forward(inputs), self.bias

    model = Model(6, 4)
    with closing(SampleTap(model)) as tap:
        made, bias = model(INPUTS)
        (made.sum() + bias.sum()).backward()
        assert len(taken(tap)) == 8
    assert not model.bias._backward_hooks


def test_a_batch_that_an_optimizer_evaluates_again_counts_once(model: nn.Module, tap: SampleTap) -> None:
    train(model)
    train(model)
    assert len(tap.take(evaluates=True)) == 8 * 8


def test_a_pass_of_a_loader_has_its_number_and_shard(model: nn.Module, tap: SampleTap) -> None:
    data = TensorDataset(INPUTS, LABELS)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True)
    loader = DataLoader(data, 2, sampler=sampler)
    passes = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            train(model, inputs, labels)
            passes.append(tap.epoch)
    assert [each[1:] for each in passes] == [(0, 1, 1, 2, 8)] * 2 + [(1, 1, 1, 2, 8)] * 2
    assert len({each[0] for each in passes}) == 2
