"""Buckets join a store between two steps, at the version of the others."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.core.errors import CheckpointCorrupt
from hubring.ps.core.messages import Init, Pull
from hubring.ps.core.types import BucketSpec, Slice, TensorSpec
from hubring.ps.store.consistency import ASP, BSP
from hubring.ps.store.key_state import Snapshot
from hubring.ps.store.parameter_memory import GpuMemory
from hubring.ps.store.store import KVStore
from tests.support.fakes.gpu import FakeMemory
from tests.support.store import answered, hub, parameters, push, sender, snapshot_of, train, values_of

MORE = BucketSpec(1, "float32", "SGD", (TensorSpec("head", (4,)),))


def extend(store: KVStore, version: int, saved: Snapshot | None = None) -> None:
    store.extend([Slice(1, 1, 0, 4, 0)], [MORE], version, saved)


def test_a_snapshot_in_progress_waits_for_the_keys_that_join() -> None:
    store = hub(BSP(), 1)
    train(store, 1, 0, 2)
    assert store.capture_at(3)
    extend(store, 2)
    store.handle(Init(sender(0), 1, torch.zeros(4)), "init")
    store.handle(push(0, 2), "a")
    assert store.captured() is None
    store.handle(push(0, 2, key=1), "b")
    snapshot = store.captured()
    assert snapshot is not None
    assert {key: state.version for key, state in snapshot.items()} == {0: 3, 1: 3}


def test_a_snapshot_that_is_complete_does_not_wait() -> None:
    store = hub(BSP(), 1)
    assert store.capture_at(None)
    extend(store, 0)
    snapshot = store.captured()
    assert snapshot is not None
    assert snapshot.keys() == {0}


def test_new_keys_can_come_from_a_checkpoint_and_catch_up() -> None:
    whole = hub(BSP(), 1, keys=2)
    train(whole, 1, 0, 2, keys=2)
    snapshot = snapshot_of(whole)
    store = hub(BSP(), 1)
    store.restore(snapshot)
    train(store, 1, 2, 5)
    extend(store, 5, snapshot)
    assert torch.equal(parameters(store, key=1), parameters(whole, key=1))
    train(store, 1, 5, 6, keys=2)
    assert store.stats().oldest == store.stats().newest == 6
    with pytest.raises(CheckpointCorrupt, match="no key 1"):
        extend(hub(BSP(), 1), 0, {0: snapshot[0]})


def test_in_asynchronous_modes_new_keys_have_clocks_of_their_own() -> None:
    store = hub(ASP(), 2)
    train(store, 2, 0, 3)
    extend(store, 6)
    store.handle(Init(sender(0), 1, torch.zeros(4)), "init")
    ((_, reply),) = store.handle(Pull(sender(1), 1), "look")
    assert (values_of(reply).clock, values_of(reply).version) == (0, 0)
    assert answered(store.handle(push(1, 0, key=1), "a")) == ["a"]


def test_a_draining_job_marks_new_keys_too() -> None:
    store = hub(BSP(), 1)
    store.drain()
    extend(store, 0)
    store.handle(Init(sender(0), 1, torch.zeros(4)), "init")
    ((_, reply),) = store.handle(push(0, 0, key=1), "a")
    assert values_of(reply).drain


def test_on_a_gpu_both_allocations_are_shown() -> None:
    memory = GpuMemory(torch.device("cpu"), FakeMemory())
    first = memory.allocate(64)
    second = memory.allocate(64, extends=True)
    codes = [memory.show(whole.view(torch.float32)).payload.tolist() for whole in (first, second)]
    assert codes[0] != codes[1]
    memory.allocate(64)
    with pytest.raises(StopIteration):
        memory.show(first.view(torch.float32))
