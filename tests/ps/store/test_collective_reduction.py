"""Reductions are those of their definitions, and never depend on who was first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.core.messages import ReduceOp
from hubring.ps.store.collective import adasum, reduced

VECTORS = st.lists(
    st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=1, max_size=5
).map(lambda rows: [torch.tensor(row) for row in rows])


@pytest.mark.parametrize("op", list(ReduceOp))
@settings(deadline=None)
@given(VECTORS)
def test_a_reduction_does_not_change_its_inputs(op: ReduceOp, tensors: list[Tensor]) -> None:
    before = [tensor.clone() for tensor in tensors]
    reduced(tensors, op).fill_(7)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


A, B = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])
X, Y, NONE = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]), torch.zeros(2)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([A, B], (1 - 5 / 10) * A + (1 - 5 / 20) * B),  # the paper's formula: a·b = 5, |a|² = 5, |b|² = 10
        ([X, Y], X + Y),
        ([X, X], X),
        ([X] * 5, X),
        ([A, NONE], A),
        ([NONE, NONE], NONE),
    ],
)
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_the_same(
    tensors: list[Tensor], expected: Tensor
) -> None:
    assert torch.equal(adasum(tensors), expected)


def test_adasum_goes_by_pairs_and_an_odd_one_goes_up_by_itself() -> None:
    tensors = [torch.randn(5, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    pairs = [adasum(tensors[:2]), adasum(tensors[2:4]), tensors[4]]
    assert torch.equal(adasum(tensors), adasum([adasum(pairs[:2]), pairs[2]]))


@settings(deadline=None)
@given(VECTORS, st.floats(0.125, 8))
def test_adasum_scales_with_its_gradients(tensors: list[Tensor], factor: float) -> None:
    wide = [tensor.double() for tensor in tensors]
    scaled = adasum([tensor * factor for tensor in wide])
    torch.testing.assert_close(scaled, adasum(wide) * factor, rtol=1e-6, atol=1e-6)
