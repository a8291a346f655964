"""The parts of a bucket's slices are its parameters, in order and without gaps."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hubring.ps.core.types import BucketSpec, TensorSpec
from hubring.ps.job.sharding import plan
from hubring.ps.job.slice_parameters import parameter_parts


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(4, 900))
def test_the_parts_of_all_slices_are_the_parameters(sizes: list[int], slice_bytes: int) -> None:
    tensors = tuple(TensorSpec(str(at), (size,)) for at, size in enumerate(sizes))
    whole = torch.arange(sum(sizes))
    came: list[list[int]] = [[] for _ in sizes]
    for piece in plan([BucketSpec(0, "float32", 0, "SGD", tensors)], 2, slice_bytes).slices:
        end = 0
        for part in parameter_parts(piece, tensors):
            assert part.in_slice.start == end
            end = part.in_slice.stop
            assert part.in_parameter.start == len(came[part.position])
            came[part.position] += whole[piece.offset :][part.in_slice].tolist()
        assert end == piece.numel
    assert came == [part.tolist() for part in whole.split(sizes)]
