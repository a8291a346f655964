"""Every codec: what comes back of a tensor, how long its code is, and what is no code."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.compression.codecs import BLOCK, Compressor
from hubring.ps.compression.compressor import by_name, codec_for, mean_into
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded
from tests.support.optimizers import random

untimed = settings(deadline=None)

NAMES = ["bf16", "fp16", "int8", "sign", "topk:0.01", "topk:0.25"]
SIZES = [1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77, (1 << 18) + 5]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

codecs = st.sampled_from([by_name(name) for name in NAMES])
numels = st.integers(1, 4 * BLOCK)
seeds = st.integers(0, 2**31)
scales = st.sampled_from([1e-30, 1e-6, 1.0, 1e3])


def code(codec: Compressor, tensor: Tensor) -> Tensor:
    payload = torch.full((codec.nbytes(tensor.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(tensor, payload)
    codec.check(payload, tensor.numel())
    return payload


def there_and_back(codec: Compressor, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full_like(tensor, math.nan, dtype=dtype or tensor.dtype)
    codec.decode(code(codec, tensor), out)
    return out


def blocks(tensor: Tensor) -> list[Tensor]:
    return list(tensor.split(BLOCK))


@untimed
@given(numels, seeds, st.sampled_from([1e-30, 1.0, 1e30]))
def test_bf16_keeps_eight_bits_of_every_number(numel: int, seed: int, scale: float) -> None:
    tensor = random(numel, seed) * scale
    apart = (there_and_back(by_name("bf16"), tensor) - tensor).abs()
    assert (apart <= tensor.abs() * 2**-8).all()


@untimed
@given(numels, seeds, st.sampled_from([1e-9, 1e-3, 1.0, 1e3]))
def test_fp16_keeps_eleven_bits_down_to_its_smallest_number(numel: int, seed: int, scale: float) -> None:
    tensor = random(numel, seed) * scale
    apart = (there_and_back(by_name("fp16"), tensor) - tensor).abs()
    assert (apart <= tensor.abs() * 2**-11 + 2**-25).all()


def test_fp16_lets_what_it_cannot_hold_become_infinite() -> None:
    back = there_and_back(by_name("fp16"), torch.tensor([65504.0, 1e5, -1e5]))
    assert back.tolist() == [65504.0, math.inf, -math.inf]


@untimed
@given(numels, seeds, scales)
def test_int8_is_off_by_half_a_scale_of_the_block_at_most(numel: int, seed: int, scale: float) -> None:
    tensor = random(numel, seed) * scale
    for block, back in zip(blocks(tensor), blocks(there_and_back(by_name("int8"), tensor)), strict=True):
        assert (back - block).abs().max() <= block.abs().max() / 127 * 0.5001 + 2.0**-94


@untimed
@given(numels, seeds, scales)
def test_sign_keeps_signs_and_the_mean_magnitude_of_the_block(numel: int, seed: int, scale: float) -> None:
    tensor = random(numel, seed) * scale
    for block, back in zip(blocks(tensor), blocks(there_and_back(by_name("sign"), tensor)), strict=True):
        assert torch.equal(back >= 0, block >= 0)
        torch.testing.assert_close(back.abs(), block.abs().mean().expand_as(block), rtol=1e-5, atol=0)


@untimed
@given(numels, seeds, st.sampled_from([0.001, 0.01, 0.25, 0.9]))
def test_topk_keeps_the_largest_exactly_and_nothing_else(numel: int, seed: int, fraction: float) -> None:
    tensor = random(numel, seed)
    assume(tensor.abs().unique().numel() == numel)
    back = there_and_back(by_name(f"topk:{fraction}"), tensor)
    kept = math.ceil(numel * fraction)
    largest = tensor.abs().topk(kept).indices
    expected = torch.zeros_like(tensor)
    expected[largest] = tensor[largest]
    assert torch.equal(back, expected)


@pytest.mark.parametrize("spread", ["normal", "sorted", "periodic", "few", "equal"])
def test_topk_keeps_the_largest_of_large_tensors_whatever_their_order(spread: str) -> None:
    numel = 200_000
    tensor = random(numel)
    if spread == "sorted":
        tensor = tensor.sort().values
    elif spread == "periodic":  # in step with the sample, which sees none of the large ones
        tensor[1 :: numel // (1 << 14)] *= 1e6
    elif spread == "few":
        tensor[50:] = 0
    elif spread == "equal":
        tensor = torch.full((numel,), 0.5)
    back = there_and_back(by_name("topk:0.01"), tensor)
    kept = back.nonzero().flatten()
    assert torch.equal(back[kept], tensor[kept])
    assert len(kept) == min(2000, int((tensor != 0).sum()))
    assert torch.equal(back.abs().sort().values[-2000:], tensor.abs().sort().values[-2000:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_floating_dtype_and_length_is_coded_as_float32_would_be(
    name: str, numel: int, dtype: torch.dtype
) -> None:
    codec = by_name(name)
    tensor = random(numel, numel, dtype)
    assert torch.equal(code(codec, tensor), code(codec, tensor.float()))
    assert torch.equal(there_and_back(codec, tensor), there_and_back(codec, tensor.float()).to(dtype))


@untimed
@given(codecs, numels, seeds)
@example(by_name("topk:0.25"), 100, 0)
def test_any_bytes_are_decoded_or_refused(codec: Compressor, numel: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (codec.nbytes(numel),), generator=generator, dtype=torch.uint8)
    try:
        codec.check(payload, numel)
    except ConfigError as error:
        assert "payload has index" in str(error)  # noqa: PT017
        return
    codec.decode(payload, torch.empty(numel))


def test_a_tensor_that_would_not_get_shorter_travels_as_it_is() -> None:
    assert codec_for("int8", 1, torch.float32) is None  # one byte and a scale of four
    assert codec_for("int8", 2, torch.float32) is by_name("int8")
    assert codec_for("bf16", 1000, torch.bfloat16) is None
    assert codec_for("int8", 1000, torch.bfloat16) is by_name("int8")
    assert codec_for("topk:0.5", 1000, torch.float32) is None
    assert codec_for("", 1000, torch.float32) is None
    assert codec_for("powersgd:4", 1000, torch.float32) is None


@untimed
@given(codecs, numels, st.integers(1, 5))
def test_the_mean_is_that_of_what_the_codes_say(codec: Compressor, numel: int, ranks: int) -> None:
    tensors = [random(numel, rank) for rank in range(ranks)]
    coded = [Coded(codec.name, code(codec, tensor), numel, tensor.dtype) for tensor in tensors]
    out = torch.empty(numel)
    mean_into(out, codec, coded, torch.empty(numel + 3))
    total = there_and_back(codec, tensors[0])
    for tensor in tensors[1:]:
        total += there_and_back(codec, tensor)
    assert torch.equal(out, total / ranks)
