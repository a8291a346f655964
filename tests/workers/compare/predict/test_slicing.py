"""A model is cut and dealt as workers and shards do it, and its slices have the size that workers choose."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.ps.job.sharding import plan
from hubring.workers.communicators import slice_sizes
from hubring.workers.compare.plan.setting import Link
from hubring.workers.compare.predict import slicing
from hubring.workers.compare.predict.exchange_terms import ExchangeTask, HubExchange
from hubring.workers.compare.predict.formulas import ExchangeCosts
from hubring.workers.compare.predict.slicing import bucket_sizes, buckets, cut, tensors
from tests.support.compare.calibration import CONSTANTS

MEBI = 1 << 20


def hub(task: ExchangeTask, workers: int = 2, servers: int = 2) -> HubExchange:
    return ExchangeCosts(CONSTANTS, task, workers).hub(servers, "zmq", steps=True, shows=True)


@given(
    nbytes=st.integers(4, 200 * MEBI),
    servers=st.integers(1, 40),
    slice_bytes=st.sampled_from([256 << 10, *slice_sizes.SIZES]),
)
@example(nbytes=30408708, servers=3, slice_bytes=256 << 10)
@example(nbytes=30670852, servers=3, slice_bytes=256 << 10)
@settings(max_examples=60, deadline=None)
def test_the_short_way_to_a_cut_agrees_with_the_plan_of_shards(
    nbytes: int, servers: int, slice_bytes: int
) -> None:
    nbytes -= nbytes % 4
    slices = plan(buckets(nbytes), servers, slice_bytes).slices
    loads = [sum(4 * piece.numel for piece in slices if piece.shard == shard) for shard in range(servers)]
    found = cut(nbytes, servers, slice_bytes)
    assert found.part * nbytes == pytest.approx(max(loads), abs=8 * slicing.WIDTH * 4096)
    assert found.count in [sum(piece.shard == shard for piece in slices) for shard in range(servers)]
    assert found.slices >= 1


def test_buckets_are_filled_as_workers_fill_them() -> None:
    from hubring.workers.optimizer import parameters
    from hubring.workers.reducer import tuning

    assert slicing.BUCKET_BYTES == parameters.BUCKET_BYTES
    assert slicing.GROUP_BYTES == tuning.SIZES
    tensors = (20 << 20, 1 << 20, 2 << 20, 2 << 20)
    assert bucket_sizes(sum(tensors), tensors) == [4 << 20, 1 << 20, 20 << 20]
    assert bucket_sizes(9 << 20) == [4 << 20, 4 << 20, 1 << 20]


def test_a_model_of_one_slice_keeps_a_second_server_idle() -> None:
    # digits --hidden 2000: all but the convolutions fit into one bucket, and so into one slice.
    tensors = (576, 64, 18_432, 128, 4_096_000, 8_000, 80_000, 40)
    task = ExchangeTask(nbytes=sum(tensors), link=Link(rate=3e8), tensors=tensors)
    assert cut(task.nbytes, 2, 4 * MEBI, tensors).part > 0.99
    # A turn of the trial takes longer than workers allow, so they keep the first size.
    assert hub(task).slices == pytest.approx(1, abs=0.01)
    assert hub(task).lockstep(2) == pytest.approx(hub(task, servers=1).lockstep(2), rel=0.02)


def test_workers_try_sizes_only_if_that_is_quick() -> None:
    quick, slow = (ExchangeTask(nbytes=40 * MEBI, link=Link(rate=rate)) for rate in (100e9, 1e9))
    assert hub(slow, workers=4, servers=4).slices == pytest.approx(3)
    assert hub(quick, workers=4, servers=4).slices > 3
    assert hub(replace(slow, slice_bytes=MEBI), workers=4, servers=4).slices == pytest.approx(10)


def test_digits_has_the_parameters_of_its_network() -> None:
    from hubring.workers.examples.digits import network

    for hidden in (0, 1, 250, 3000):
        sizes = tuple(4 * parameter.numel() for parameter in network(0, hidden).parameters())
        assert tensors("digits", sum(sizes)) == sizes
        assert tensors("digits", round(1.0001 * sum(sizes))) == sizes
    assert tensors("digits", 20_000) == tensors("char-lm", 39_720) == tensors(None, 39_720) == ()
