"""A model is cut and dealt as workers and shards do it, and its slices have the size that workers choose."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.ps.job.sharding import plan
from hubring.workers.communicators import slice_sizes
from hubring.workers.compare.cost.model import formulas, overlap, slicing
from hubring.workers.compare.cost.model.exchange_terms import Way
from hubring.workers.compare.cost.model.formulas import Task
from hubring.workers.compare.cost.model.slicing import bucket_sizes, buckets, cut
from hubring.workers.compare.experiment.setting import Link
from tests.support.compare.calibration import CONSTANTS

MEBI = 1 << 20


def hub(task: Task, workers: int = 2, servers: int = 2) -> Way:
    return formulas.hub(CONSTANTS, task, workers, servers, "zmq", steps=True, shows=True)


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
    from hubring.workers.optimizer import setup
    from hubring.workers.reducer import tuning

    assert slicing.BUCKET_BYTES == setup.BUCKET_BYTES
    assert overlap.GROUP_BYTES == tuning.SIZES
    tensors = (20 << 20, 1 << 20, 2 << 20, 2 << 20)
    assert bucket_sizes(sum(tensors), tensors) == [4 << 20, 1 << 20, 20 << 20]
    assert bucket_sizes(9 << 20) == [4 << 20, 4 << 20, 1 << 20]


def test_a_model_of_one_slice_keeps_a_second_server_idle() -> None:
    # digits --hidden 2000: all but the convolutions fit into one bucket, and so into one slice.
    tensors = (576, 64, 18_432, 128, 4_096_000, 8_000, 80_000, 40)
    task = Task(nbytes=sum(tensors), link=Link(rate=3e8), tensors=tensors)
    assert cut(task.nbytes, 2, 4 * MEBI, tensors).part > 0.99
    # A turn of the trial takes longer than workers allow, so they keep the first size.
    assert hub(task).slices == pytest.approx(1, abs=0.01)
    assert hub(task).lockstep(2) == pytest.approx(hub(task, servers=1).lockstep(2), rel=0.02)


def test_workers_try_sizes_only_if_that_is_quick() -> None:
    quick, slow = (Task(nbytes=40 * MEBI, link=Link(rate=rate)) for rate in (100e9, 1e9))
    assert hub(slow, workers=4, servers=4).slices == pytest.approx(3)
    assert hub(quick, workers=4, servers=4).slices > 3
    assert hub(replace(slow, slice_bytes=MEBI), workers=4, servers=4).slices == pytest.approx(10)


def test_slices_of_a_codec_are_cut_from_the_whole_model() -> None:
    whole = Task(nbytes=40 * MEBI, link=Link(rate=100e9))
    coded = replace(whole, traffic=0.25)
    assert hub(coded).slices == pytest.approx(5)
    assert hub(coded).own == pytest.approx(hub(whole).own / 4)


def test_the_last_group_is_never_hidden() -> None:
    assert overlap.hidden(1.0, 5.0, 0.0, 20 << 20) == pytest.approx(0.8)  # in groups of 4 MiB
    assert overlap.hidden(1.0, 5.0, 0.0, 4 << 20) == 0.0  # one bucket
    assert overlap.hidden(1.0, 0.0, 5.0, 100 << 20) == 0.0


def test_an_exchange_cannot_begin_before_its_gradients() -> None:
    # Of four equal groups the first is ready after a quarter of backward; the exchange then has no pause.
    assert overlap.shown(1.0, 0.4, [1, 1, 1, 1]) == pytest.approx(1.0 - 0.3)
    assert overlap.shown(0.2, 10.0, [1, 1, 1, 1]) == pytest.approx(0.05)
    assert overlap.shown(1.0, 0.4, [1] * 9 + [3], even=True) == overlap.shown(1.0, 0.4, [1] * 9 + [3])


def test_groups_stay_as_they_are_if_others_gain_little() -> None:
    assert overlap.hidden(0.1, 0.1, 10.0, 20 << 20) == 0.0


def test_a_burst_passes_at_once_but_no_link_outruns_its_rate() -> None:
    link = Link(rate=20e6)
    small, together = Task(nbytes=64 << 10, link=link), Task(nbytes=64 << 10, link=link, together=True)
    plain = hub(small, 1, 1).lockstep(1)
    paused = hub(replace(together, pause=1.0), 1, 1).lockstep(1)
    assert paused < 0.2 * plain, "the whole model is less than a burst"
    steady = hub(together, 4, 1).lockstep(4)
    assert steady >= 4 * (64 << 10) * 8 / 20e6
