"""Gradients in a bucket's memory behave as tensors of their own, as in torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hubring.workers.buckets.bucketing import make_buckets
from tests.support.training.buckets import allocate, buckets_of


def backward(model: nn.Module, factor: float) -> None:
    model(torch.full((1, 2), float(factor))).sum().backward()


def test_a_gradient_that_grows_in_place_stays_the_same_tensor_as_in_torch() -> None:
    model = nn.Linear(2, 1)
    (bucket,) = buckets_of(model)
    backward(model, 3)
    bucket.seal()
    kept = model.weight.grad
    assert bucket.shown.free()
    backward(model, 5)
    assert kept is model.weight.grad
    assert kept is not None
    assert kept.tolist() == [[8, 8]]


def test_a_sparse_gradient_is_exchanged_dense_and_shown_sparse(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    (bucket,) = make_buckets(torch.optim.SparseAdam(layer.parameters()), None, allocate, 100, "")
    layer(torch.tensor([1, 3, 3])).sum().backward()
    bucket.seal()
    assert bucket.gradients.tolist() == [0, 0, 1, 1, 0, 0, 2, 2]
    bucket.gradients.mul_(0.5)
    bucket.show_means()
    assert layer.weight.grad is not None
    assert layer.weight.grad.layout is torch.sparse_coo
    assert layer.weight.grad.coalesce().indices().tolist() == [[1, 3]]
    assert "shape [4, 2] is sparse, and is exchanged as a dense tensor of 0.0 MB" in caplog.text
