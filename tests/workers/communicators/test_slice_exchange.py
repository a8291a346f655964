"""A slice's code: nothing of a gradient is lost, also where no rank has one."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.compression.compressor import by_name
from hubring.ps.core.types import Slice, TensorSpec
from hubring.ps.job.slice_parameters import parameter_parts
from hubring.workers.communicators.slice_exchange import SliceCoder

PARTS = parameter_parts(
    Slice(0, 0, 40, 100, 0), (TensorSpec("a", (60,)), TensorSpec("b", (50,)), TensorSpec("c", (90,)))
)


def coder(name: str, gradient: torch.Tensor) -> SliceCoder:
    codec = by_name(name)
    return SliceCoder(codec, gradient, torch.empty(codec.nbytes(100), dtype=torch.uint8), PARTS)


@pytest.mark.parametrize("name", ["int8", "sign", "topk:0.05", "bf16"])
@pytest.mark.parametrize("everywhere", [(), (1,), (0, 1)])
def test_only_what_is_absent_on_every_rank_keeps_its_residual(name: str, everywhere: tuple[int, ...]) -> None:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0))
    one, other = coder(name, gradient), coder(name, gradient)
    for each in (one, other):
        each.encode()
    before = one._feedback.residual.clone()
    for part in PARTS[:2]:
        gradient[part.in_slice] = 0
    assert torch.equal(one.encode((0, 1)).payload, other.encode().payload)
    one.restore(everywhere)
    for part in PARTS:
        expected = before if part.position in everywhere else other._feedback.residual
        assert torch.equal(one._feedback.residual[part.in_slice], expected[part.in_slice])
