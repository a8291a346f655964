"""A slice's code: nothing of a gradient is lost, also where no rank has one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from hubring.ps.compression.compressor import by_name
from hubring.ps.core.types import Slice, TensorSpec
from hubring.ps.job.sharding import parameter_parts
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.communicators.slice_exchange import Absence, SliceCoder, SliceExchange

PARTS = parameter_parts(
    Slice(0, 0, 40, 100, 0), (TensorSpec("a", (60,)), TensorSpec("b", (50,)), TensorSpec("c", (90,)))
)


def coder(name: str) -> SliceCoder:
    codec = by_name(name)
    payload = torch.empty(codec.nbytes(100), dtype=torch.uint8)
    return SliceCoder(codec, 100, torch.float32, payload, PARTS)


@pytest.mark.parametrize("name", ["int8", "sign", "topk:0.05", "bf16"])
@pytest.mark.parametrize("everywhere", [(), (1,), (0, 1)])
def test_only_what_is_absent_on_every_rank_keeps_its_residual(name: str, everywhere: tuple[int, ...]) -> None:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0))
    one, other = coder(name), coder(name)
    for each in (one, other):
        each.encode(gradient)
    before = one._feedback.residual.clone()
    for part in PARTS[:2]:
        gradient[part.in_slice] = 0
    assert torch.equal(one.encode(gradient, (0, 1)).payload, other.encode(gradient).payload)
    one.restore(everywhere)
    for index, part in enumerate(PARTS):
        expected = before if index in everywhere else other._feedback.residual
        assert torch.equal(one._feedback.residual[part.in_slice], expected[part.in_slice])


class Recorder:
    """A client that keeps what is pushed."""

    prepare = staticmethod(lambda key, *_: key)

    def __init__(self) -> None:
        self.pushes: list[tuple[int, tuple[int, ...], Callable[[tuple[int, ...]], None] | None]] = []

    def attend(self) -> None:
        """Does nothing."""

    def batched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def push_pull(self, *arguments: Any) -> None:
        _, key, *_, absent, on_absent, _, _ = arguments
        self.pushes.append((key, absent, on_absent))


@pytest.mark.parametrize("codec", ["", "int8"])
def test_a_slice_names_only_its_own_parameters(codec: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(600)) for _ in range(4)]

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    (bucket,) = make_buckets(torch.optim.SGD(parameters), None, allocate, 1 << 20, "")
    client: Any = Recorder()
    exchange, spec = SliceExchange(client, means=True), bucket.spec
    exchange.add(spec, [Slice(0, 0, 0, 900, 0), Slice(1, 0, 900, 900, 0), Slice(2, 0, 1800, 600, 0)])
    if codec:
        exchange.compress([bucket], codec, allocate)
    bucket.absent = frozenset({1, 3})
    absent = Absence(bucket, reports=True)
    exchange.push_pull(0, bucket.host_gradients, bucket.host_gradients, {}, absent)
    sent = {key: (indices, on_absent) for key, indices, on_absent in client.pushes}
    assert {key: indices for key, (indices, _) in sent.items()} == {0: (1,), 1: (0,), 2: (0,)}
    for key, everywhere in ((0, (1,)), (1, (0,)), (2, ())):
        note = sent[key][1]
        assert note is not None
        note(everywhere)
    assert bucket.absent == {1}, "some rank has a gradient of the last one"
