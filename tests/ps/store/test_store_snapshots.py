"""Snapshots of a shard's store: which version they hold, and that a restored one goes on."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.core.errors import CheckpointCorrupt
from hubring.ps.core.messages import Init, Pull
from hubring.ps.core.types import Slice
from hubring.ps.store.consistency import ASP, BSP, BackupWorkers
from hubring.ps.store.store import KVStore
from tests.support.store import bucket, hub, parameters, push, sender, snapshot_of, values_of, view


def test_keys_that_backup_workers_left_apart_start_at_one_step() -> None:
    store = hub(BackupWorkers(1), 2, keys=2)
    store.handle(push(0, 0, key=0), "a")
    store.handle(push(0, 1, key=0), "b")
    store.handle(push(1, 0, key=1), "c")
    snapshot = snapshot_of(store)
    assert [state.version for state in snapshot.values()] == [2, 1]

    restored = hub(BackupWorkers(1), 2, keys=2, initialise=False)
    restored.restore(snapshot, 1)
    assert (restored.stats().oldest, restored.stats().newest) == (1, 1)
    for key, values in ((0, 2.0), (1, 1.0)):
        reply = values_of(restored.handle(Pull(sender(1), key), "pull")[0].reply)
        assert reply.clock == 1
        assert isinstance(reply.values, torch.Tensor)
        assert torch.equal(reply.values, torch.full((4,), values))


def test_a_lockstep_snapshot_holds_every_key_at_the_same_version() -> None:
    store = hub(BSP(), 1, keys=2)
    store.handle(push(0, 0, key=0), "a")
    assert store.capture_at(2)
    answers = [values_of(store.handle(push(0, clock, key=0), clock)[0].reply) for clock in (1, 2, 3)]
    assert [answer.saved for answer in answers] == [True, False, False]
    assert store.captured() is None
    for clock in range(4):
        store.handle(push(0, clock, key=1), clock)
    snapshot = store.captured()
    assert snapshot is not None
    assert {key: (state.version, state.values.tolist()) for key, state in snapshot.items()} == {
        key: (2, [2.0] * 4) for key in range(2)
    }
    assert store.captured() is None


def test_a_version_that_some_key_has_passed_cannot_be_caught_any_more() -> None:
    store = hub(BSP(), 1, keys=2)
    store.handle(push(0, 0), "a")
    assert not store.capture_at(0)
    assert store.captured() is None
    assert store.stats().newest == 1
    assert store.stats().oldest == 0
    assert not store.capture_at(1), "workers have answers of key 0 that do not ask for their states"
    assert store.capture_at(2)
    store.stop_capture()
    store.handle(push(0, 0, key=1), "b")
    assert store.captured() is None


def test_an_asynchronous_snapshot_is_of_now_and_later_pushes_do_not_change_it() -> None:
    store = hub(ASP(), 2)
    store.handle(push(0, 0), "a")
    store.handle(push(1, 0), "b")
    store.handle(push(0, 1), "c")
    snapshot = snapshot_of(store)
    store.handle(push(0, 2), "d")
    assert snapshot[0].values.tolist() == [3.0] * 4
    assert snapshot[0].clocks == {0: 2, 1: 1}

    restored = KVStore(ASP())
    restored.assign([Slice(0, 0, 0, 4, 0)], [bucket(4)])
    restored.restore(snapshot)
    restored.on_view(view(1, sender(0, life=3), sender(1, life=3)))
    pulled = [values_of(restored.handle(Pull(sender(rank, life=3), 0), rank)[0].reply) for rank in range(2)]
    assert [(values.clock, values.version) for values in pulled] == [(2, 3), (1, 3)]


def test_an_asynchronous_store_ignores_pushes_that_its_checkpoint_has() -> None:
    store = hub(ASP(), 2, keys=2)
    for rank, key, clock in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)):
        store.handle(push(rank, clock, key=key), "a")
    snapshot = snapshot_of(store)
    assert [state.clocks for state in snapshot.values()] == [{0: 2, 1: 1}, {0: 1, 1: 0}]

    restored = hub(ASP(), 2, keys=2, initialise=False)
    restored.restore(snapshot, 0)
    for rank, first in ((0, 1), (1, 0)):  # the steps that each rank completed on both keys
        for key in range(2):
            for clock in range(first, 3):
                (delivery,) = restored.handle(push(rank, clock, key=key), clock)
                assert values_of(delivery.reply).clock == clock + 1
    for key in range(2):
        assert torch.equal(parameters(restored, key=key), torch.full((4,), 6.0))  # 3 pushes of each rank


def test_a_rank_that_left_resumes_where_it_left() -> None:
    store = hub(ASP(), 3)
    for rank, clock in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        store.handle(push(rank, clock), "a")
    store.on_view(view(5, sender(0)))
    snapshot = snapshot_of(store)
    # Rank 2 did not push, and does not hold up the others.
    assert snapshot[0].clocks == {0: 2, 1: 3, 2: 2}


def test_a_rank_that_the_checkpoint_does_not_know_starts_at_its_step() -> None:
    store = hub(ASP(), 1)
    store.handle(push(0, 0), "a")
    store.handle(push(0, 1), "b")
    snapshot = snapshot_of(store)
    restored = hub(ASP(), 2, initialise=False)
    restored.restore(snapshot, 1)
    pulled = [values_of(restored.handle(Pull(sender(rank), 0), rank)[0].reply) for rank in range(2)]
    assert [values.clock for values in pulled] == [2, 1]


def test_a_key_without_values_is_caught_when_it_gets_them() -> None:
    store = hub(ASP(), 1, initialise=False)
    assert store.capture_at(None)
    assert store.captured() is None
    store.handle(Init(sender(0), 0, torch.ones(4)), "init")
    snapshot = store.captured()
    assert snapshot is not None
    assert snapshot[0].values.tolist() == [1.0] * 4


def test_a_snapshot_of_another_model_is_refused() -> None:
    store = hub(BSP(), 1)
    store.capture_at(None)
    snapshot = store.captured()
    assert snapshot is not None
    with pytest.raises(CheckpointCorrupt, match="has no key 1"):
        hub(BSP(), 1, keys=2).restore(snapshot)
    with pytest.raises(CheckpointCorrupt, match="another job wrote this checkpoint"):
        hub(BSP(), 1, numel=5).restore(snapshot)
