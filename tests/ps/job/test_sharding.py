"""Plans: every element once, loads balanced, cuts independent of the shards."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, TensorSpec
from hubring.ps.job.sharding import deal, loads_of, number_of_slices, parameter_parts, plan


def bucket(index: int, numel: int, dtype: str = "float32") -> BucketSpec:
    return BucketSpec(index, dtype, "SGD", (TensorSpec("weight", (numel,)),))


buckets = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from(["float64", "float32", "bfloat16", "int8"])), max_size=6
).map(lambda drawn: [bucket(index, numel, dtype) for index, (numel, dtype) in enumerate(drawn)])


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(buckets, st.integers(1, 7), st.integers(8, 3000))
def test_a_plan_has_each_element_once_in_the_same_cuts_on_any_number_of_shards_and_loads_all_alike(
    buckets: list[BucketSpec], shards: int, slice_bytes: int
) -> None:
    slices = plan(buckets, shards, slice_bytes).slices
    assert len(slices) == number_of_slices(buckets, slice_bytes)
    assert [piece.key for piece in slices] == list(range(len(slices)))
    covered = [
        (piece.bucket, at) for piece in slices for at in range(piece.offset, piece.offset + piece.numel)
    ]
    assert covered == [(each.index, at) for each in buckets for at in range(each.numel)]
    alone = plan(buckets, 1, slice_bytes).slices
    assert [replace(piece, shard=0) for piece in slices] == list(alone)
    sizes = [piece.numel * DTYPE_BYTES[buckets[piece.bucket].dtype] for piece in slices]
    assert all(0 < nbytes <= slice_bytes for nbytes in sizes)
    loads = [0] * shards
    for piece, nbytes in zip(slices, sizes, strict=True):
        loads[piece.shard] += nbytes
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_slices_that_are_cut_already_keep_their_cuts_when_dealt_anew() -> None:
    model = [bucket(0, 1000), bucket(1, 10)]
    before = plan(model, 3, slice_bytes=1024).slices
    after = deal(before, model, 2).slices
    assert after == plan(model, 2, slice_bytes=1024).slices
    assert {piece.shard for piece in after} == {0, 1}


def test_the_slices_in_checkpoints_stay_as_they_are() -> None:
    slices = plan([bucket(0, 30_003), bucket(1, 5_000, "bfloat16")], 2, 65_536).slices
    assert msgspec.json.encode(slices) == (
        b'[{"key":0,"bucket":0,"offset":0,"numel":15360,"shard":0},'
        b'{"key":1,"bucket":0,"offset":15360,"numel":14643,"shard":1},'
        b'{"key":2,"bucket":1,"offset":0,"numel":5000,"shard":1}]'
    )


def test_no_tiny_rest_is_left_over() -> None:
    sizes = [piece.numel for piece in plan([bucket(0, 1025)], 1, slice_bytes=4096).slices]
    assert sizes == [528, 497]


def test_slices_start_between_vectors() -> None:
    slices = plan([bucket(0, 100_003)], 3, slice_bytes=40_000).slices
    assert len(slices) > 2
    assert all(piece.offset * 4 % 64 == 0 for piece in slices)


@pytest.mark.parametrize(
    ("shards", "slice_bytes", "dtype", "named"),
    [(0, 64, "float32", "--shards"), (1, 3, "float32", "--slice-bytes 3"), (1, 64, "complex64", "complex64")],
)
def test_an_invalid_plan_is_refused_by_name(shards: int, slice_bytes: int, dtype: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan([bucket(0, 10, dtype)], shards, slice_bytes)


def test_slices_that_join_go_to_the_shards_that_hold_least() -> None:
    first = [bucket(0, 100), bucket(1, 60)]
    held = plan(first, 3, 1024)
    assert [piece.shard for piece in held.slices] == [0, 1]
    loads = loads_of(held, first, 3)
    assert loads == [400, 240, 0]
    more = [bucket(2, 30), bucket(3, 60)]
    assert [piece.shard for piece in plan(more, 3, 1024, loads).slices] == [1, 2]
    assert deal(plan(more, 1, 1024).slices, more, 3, loads) == plan(more, 3, 1024, loads)


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(4, 900))
def test_the_parts_of_all_slices_are_the_parameters(sizes: list[int], slice_bytes: int) -> None:
    tensors = tuple(TensorSpec(str(at), (size,)) for at, size in enumerate(sizes))
    whole = torch.arange(sum(sizes))
    came: list[list[int]] = [[] for _ in sizes]
    for piece in plan([BucketSpec(0, "float32", "SGD", tensors)], 2, slice_bytes).slices:
        end = 0
        for part in parameter_parts(piece, tensors):
            assert part.in_slice.start == end
            end = part.in_slice.stop
            assert part.in_parameter.start == len(came[part.position])
            came[part.position] += whole[piece.offset :][part.in_slice].tolist()
        assert end == piece.numel
    assert came == [part.tolist() for part in whole.split(sizes)]
