"""Error feedback: nothing is lost, only late."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.compression.compressor import Compressor, by_name
from hubring.ps.compression.error_feedback import ErrorFeedback

untimed = settings(deadline=None)

BIASED = ["int8", "sign", "topk:0.05"]


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sent(feedback: ErrorFeedback, codec: Compressor, gradient: Tensor) -> Tensor:
    payload = torch.empty(codec.nbytes(gradient.numel()), dtype=torch.uint8)
    feedback.encode(gradient, payload)
    out = torch.empty(gradient.numel())
    codec.decode(payload, out)
    return out


@untimed
@given(
    st.sampled_from(BIASED),
    st.integers(1, 2000),
    st.integers(1, 6),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_what_was_sent_and_what_is_left_is_what_was_given(
    name: str, numel: int, steps: int, dtype: torch.dtype
) -> None:
    codec = by_name(name)
    feedback = ErrorFeedback(codec, numel, dtype)
    gradients = [random(numel, step, dtype) for step in range(steps)]
    total = sum(sent(feedback, codec, gradient).double() for gradient in gradients)
    whole = sum(gradient.double() for gradient in gradients)
    torch.testing.assert_close(total + feedback.residual.double(), whole, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", BIASED)
def test_a_gradient_is_only_read(name: str) -> None:
    gradient = random(3000, 1)
    before = gradient.clone()
    sent(ErrorFeedback(by_name(name), 3000, torch.float32), by_name(name), gradient)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_codec_that_is_not_biased_keeps_nothing(name: str) -> None:
    codec = by_name(name)
    feedback = ErrorFeedback(codec, 100, torch.float32)
    first, again = (sent(feedback, codec, random(100, 3)) for _ in range(2))
    assert torch.equal(first, again)
    assert feedback.residual.numel() == 0


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_told_and_leaves_nothing_behind(name: str, value: float) -> None:
    codec = by_name(name)
    feedback = ErrorFeedback(codec, 3000, torch.float32)
    broken = random(3000, 1)
    broken[1234] = value
    assert not sent(feedback, codec, broken).isfinite().all()
    assert sent(feedback, codec, random(3000, 2)).isfinite().all()


def descend(name: str, large: float, *, feedback: bool) -> Tensor:
    """Two ranks whose large first gradients cancel; the least mean loss is at (0, 1)."""
    codec, values, rate = by_name(name), torch.zeros(2), 0.05
    ranks = [ErrorFeedback(codec, 2, torch.float32) for _ in range(2)]
    for _ in range(150):
        pull = values - torch.tensor([0.0, 1.0])
        total = torch.zeros(2)
        for rank, sign in zip(ranks, (1, -1), strict=True):
            gradient = pull + torch.tensor([sign * large, 0.0])
            total += sent(rank if feedback else ErrorFeedback(codec, 2, torch.float32), codec, gradient)
        values = values - rate * total / 2
    return values


@pytest.mark.parametrize(("name", "large"), [("int8", 1000.0), ("topk:0.5", 5.0)])
def test_small_elements_beside_large_ones_arrive_by_feedback_alone(name: str, large: float) -> None:
    assert descend(name, large, feedback=False).tolist() == [0.0, 0.0]
    assert abs(descend(name, large, feedback=True)[1] - 1) < 0.25


@pytest.mark.parametrize("name", BIASED)
def test_what_no_reader_uses_keeps_its_residual(name: str) -> None:
    codec = by_name(name)
    feedback, other = (ErrorFeedback(codec, 100, torch.float32) for _ in range(2))
    for each in (feedback, other):
        sent(each, codec, random(100, 0))
    before = feedback.residual.clone()
    payload, expected = (torch.empty(codec.nbytes(100), dtype=torch.uint8) for _ in range(2))
    feedback.encode(random(100, 1), payload, [slice(10, 20), slice(90, 100)])
    other.encode(random(100, 1), expected)
    assert torch.equal(payload, expected)
    kept = torch.zeros(100, dtype=torch.bool)
    kept[10:20] = kept[90:] = True
    assert torch.equal(feedback.residual[kept], before[kept])
    assert torch.equal(feedback.residual[~kept], other.residual[~kept])
