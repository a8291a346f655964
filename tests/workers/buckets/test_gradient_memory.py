"""Gradients in a bucket's memory behave as tensors of their own, as in torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hubring.workers.buckets.bucketing import make_buckets, move_gradients
from tests.support.training.buckets import allocate, buckets_of


def test_sealing_collects_gradients_and_notes_the_absent_ones() -> None:
    model = nn.Linear(2, 1)
    (bucket,) = buckets_of(model)
    bucket.gradients.fill_(7)
    model.weight.grad = torch.tensor([[1.0, 2.0]])
    assert not bucket.holds_gradients()
    before = bucket.changes
    bucket.collect()
    assert bucket.holds_gradients()
    assert bucket.changes > before
    before = bucket.changes
    bucket.seal()
    assert bucket.changes == before, "sealing is not a change by the script"
    assert bucket.gradients.tolist() == [0, 1, 2]
    assert bucket.absent == {0}
    assert model.bias.grad is None


def test_gradients_from_before_are_kept() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    (bucket,) = buckets_of(model)
    bucket.seal()
    assert bucket.gradients.tolist() == [1, 1, 1]


def backward(model: nn.Module, factor: float) -> None:
    model(torch.full((1, 2), float(factor))).sum().backward()


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the gradient": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1),
    "detached": lambda gradient: gradient.detach(),
    "its data": lambda gradient: gradient.data,
    "a part": lambda gradient: gradient[0, 1:],
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_gradient_that_the_script_kept_is_not_overwritten(
    keep: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = nn.Linear(2, 1)
    (bucket,) = buckets_of(model)
    backward(model, 3)
    bucket.seal()
    assert model.weight.grad is not None
    kept = keep(model.weight.grad)
    model.zero_grad()
    if not bucket.free():
        move_gradients([bucket], allocate, adjacent=False)
    backward(model, 5)
    bucket.seal()
    assert bucket.gradients.tolist() == [1, 5, 5]
    assert set(kept.flatten().tolist()) == {3}
    del kept
    model.zero_grad()
    assert bucket.free()


def test_a_gradient_that_grows_in_place_stays_the_same_tensor_as_in_torch() -> None:
    model = nn.Linear(2, 1)
    (bucket,) = buckets_of(model)
    backward(model, 3)
    bucket.seal()
    kept = model.weight.grad
    assert bucket.free()
    backward(model, 5)
    assert kept is model.weight.grad
    assert kept is not None
    assert kept.tolist() == [[8, 8]]


def test_a_gradient_with_other_data_moves_back_into_the_bucket() -> None:
    model = nn.Linear(2, 1)
    (bucket,) = buckets_of(model)
    backward(model, 3)
    bucket.seal()
    assert model.weight.grad is not None
    model.weight.grad.data = torch.tensor([[7.0, 8.0]])
    assert not bucket.holds_gradients()
    bucket.seal()
    assert bucket.gradients.tolist() == [1, 7, 8]


def test_a_gradient_with_a_graph_keeps_it() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    (bucket,) = make_buckets(torch.optim.SGD([weight], lr=0.1), None, allocate, 100, "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (weight**3).sum().backward(create_graph=True)
    bucket.seal()
    assert bucket.gradients.tolist() == [12.0]
    assert weight.grad is not None
    (second,) = torch.autograd.grad(weight.grad.sum(), weight)
    assert second.item() == 12.0
    bucket.gradients.fill_(6.0)
    bucket.show_means()
    assert weight.grad.tolist() == [6.0]


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
