"""Gradients add up in their order, and a sum that is not finite is refused."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.core.errors import NonFinite
from hubring.ps.optim.sums import MOST, WORTH, finite_sum, summed

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, WORTH, WORTH + 7])
@pytest.mark.parametrize("count", [1, 2, MOST, MOST + 1])
def test_a_finite_sum_is_torchs_sum_bit_by_bit(count: int, numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    given = [torch.randn(numel).to(dtype) for _ in range(count)]
    expected = given[0].clone()
    for gradient in given[1:]:
        expected += gradient
    scratch = torch.empty(numel + 3, dtype=dtype)
    assert torch.equal(finite_sum(given, scratch), expected)
    assert torch.equal(summed(given, scratch), expected)


@pytest.mark.parametrize(("wrong", "rank"), [(float("nan"), 0), (float("inf"), 1), (-float("inf"), 0)])
@pytest.mark.parametrize("place", [0, 15, 16, WORTH - 1, WORTH, WORTH + 6])
def test_one_element_that_is_not_finite_is_found_wherever_it_is(wrong: float, place: int, rank: int) -> None:
    given = [torch.ones(WORTH + 7) for _ in range(2)]
    given[rank][place] = wrong
    with pytest.raises(NonFinite):
        finite_sum(given, torch.empty(WORTH + 7))
