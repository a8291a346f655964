"""Error feedback: nothing is lost, only late."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.compression.codecs import Compressor
from hubring.ps.compression.compressor import ErrorFeedback, by_name
from tests.support.optimizers import random

untimed = settings(deadline=None)

BIASED = ["int8", "sign", "topk:0.05"]


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
def test_sent_and_residual_add_up_to_the_gradients(
    name: str, numel: int, steps: int, dtype: torch.dtype
) -> None:
    codec = by_name(name)
    feedback = ErrorFeedback(codec, numel, dtype)
    gradients = [random(numel, step, dtype) for step in range(steps)]
    total = sum(sent(feedback, codec, gradient).double() for gradient in gradients)
    whole = sum(gradient.double() for gradient in gradients)
    torch.testing.assert_close(total + feedback.residual.double(), whole, rtol=1e-5, atol=2e-5)


def test_the_residual_of_elements_that_no_reader_uses_stays() -> None:
    codec, ignored = by_name("sign"), slice(2, 5)
    feedback = ErrorFeedback(codec, 8, torch.float32)
    feedback.encode(random(8, 2), torch.empty(codec.nbytes(8), dtype=torch.uint8), [ignored])
    assert feedback.residual.count_nonzero() == 8 - feedback.residual[ignored].numel()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_codec_that_is_not_biased_keeps_nothing(name: str) -> None:
    codec = by_name(name)
    feedback = ErrorFeedback(codec, 100, torch.float32)
    first, again = (sent(feedback, codec, random(100, 3)) for _ in range(2))
    assert torch.equal(first, again)
    assert feedback.residual.numel() == 0
