from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from hubring.ps.core.errors import UsageError
from hubring.workers.runtime import context
from hubring.workers.runtime.sampler import ShardedSampler

lengths = st.integers(1, 60)
sizes = st.integers(1, 6)


def samples(length: int, rank: int, size: int, epoch: int = 0, **kwargs: object) -> list[int]:
    sampler = ShardedSampler(range(length), rank=rank, size=size, **kwargs)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("dataset", [DataLoader(TensorDataset(torch.zeros(4))), iter(range(4))])
def test_a_dataset_whose_samples_have_no_numbers_is_refused(dataset: Any) -> None:
    with pytest.raises(
        UsageError, match=r"the dataset is a \w+, whose samples have no numbers: pass the dataset"
    ):
        ShardedSampler(dataset, rank=0, size=1)


@given(length=lengths, size=sizes, seed=st.integers(0, 5), shuffle=st.booleans())
def test_ranks_get_equally_many_distinct_samples(length: int, size: int, seed: int, shuffle: bool) -> None:
    size = min(size, length)
    parts = [samples(length, rank, size, seed=seed, shuffle=shuffle) for rank in range(size)]
    assert {len(part) for part in parts} == {length // size}
    together = [sample for part in parts for sample in part]
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(length))


@given(
    length=lengths,
    shares=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    rows=st.integers(1, 5),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_the_ranks_batches_of_a_step_are_one_process_batch(
    length: int, shares: list[int], rows: int, seed: int, epoch: int
) -> None:
    size, length = len(shares), length + sum(shares)
    alone = samples(length, 0, 1, epoch, seed=seed)
    given = {} if set(shares) == {1} else {"shares": shares}
    parts = [samples(length, rank, size, epoch, seed=seed, **given) for rank in range(size)]
    steps = length // sum(shares) // rows
    assert [len(part) for part in parts] == [length // sum(shares) * share for share in shares]
    for step in range(steps):
        union = list[int]()
        for part, share in zip(parts, shares, strict=True):
            union += part[step * rows * share : (step + 1) * rows * share]
        batch = rows * sum(shares)
        assert sorted(union) == sorted(alone[step * batch : (step + 1) * batch])


@pytest.mark.parametrize("shares", [[], [1], [1, 0], [1, 2.5], [2, 1, 1]])
def test_shares_that_do_not_fit_the_ranks_are_refused(shares: list[int]) -> None:
    with pytest.raises(UsageError, match="pass a whole number of at least 1 for each of the 2 ranks"):
        ShardedSampler(range(9), rank=0, size=2, shares=shares)


def test_shares_are_refused_where_samples_are_dealt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = SimpleNamespace(members=object(), rank=0, size=2)
    monkeypatch.setattr(context, "current", lambda: SimpleNamespace(communicator=communicator))
    with pytest.raises(UsageError, match="a ring with --min-workers deals all ranks alike"):
        ShardedSampler(range(9), shares=[2, 1])


@given(length=lengths, size=sizes, data=st.data())
def test_a_resumed_epoch_goes_on_where_it_stopped(length: int, size: int, data: st.DataObject) -> None:
    size = min(size, length)
    done = data.draw(st.integers(0, length // size))
    whole = samples(length, size - 1, size, epoch=2)
    sampler = ShardedSampler(range(length), rank=size - 1, size=size)
    sampler.set_epoch(2)
    sampler.resume(done)
    assert len(sampler) == len(whole) - done
    assert list(sampler) == whole[done:]
    assert list(sampler) == whole


def test_each_epoch_has_its_own_order_and_seeds_differ() -> None:
    orders = [samples(50, 0, 1, epoch, seed=seed) for seed in (0, 100) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert samples(50, 0, 1, 1) == samples(50, 0, 1, 1)


def test_a_data_loader_takes_it() -> None:
    numbers = TensorDataset(torch.arange(8))
    loader = DataLoader(numbers, batch_size=2, sampler=ShardedSampler(numbers, False, rank=1, size=2))
    assert [batch.tolist() for (batch,) in loader] == [[1, 3], [5, 7]]


@pytest.mark.parametrize(
    ("rank", "size", "length", "match"),
    [(2, 2, 9, "0 to 1"), (-1, 2, 9, "0 to 1"), (0, 5, 4, "start fewer workers")],
)
def test_impossible_places_are_refused(rank: int, size: int, length: int, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ShardedSampler(range(length), rank=rank, size=size)


@pytest.mark.parametrize("done", [-1, 5])
def test_more_samples_done_than_there_are_is_refused(done: int) -> None:
    with pytest.raises(UsageError, match="a rank has 4 an epoch"):
        ShardedSampler(range(8), rank=0, size=2).resume(done)
