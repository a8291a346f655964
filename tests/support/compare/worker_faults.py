"""Faults of workers: in what they send, and in the steps that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hubring.ps.client.client import KVClient
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.optimizer.bucket_steps import Stepper
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.optimizer.reducers import Reducers
from tests.support.compare.audited import HERE


@contextmanager
def dropping(which: Callable[[int, int, int], bool]) -> Iterator[None]:
    """Workers pull instead of pushing: `which` gets the rank, the key, and the number of the push to it."""
    push_pull, numbers = KVClient.push_pull, Counter[tuple[int, int]]()

    def wrong(
        client: KVClient,
        shard: int,
        key: int,
        gradient: Any,
        into: Any,
        hyper: Any,
        work: Any,
        *rest: Any,
        **more: Any,
    ) -> None:
        rank = client.sender.rank
        numbers[rank, key] += 1
        if which(rank, key, numbers[rank, key]):
            client.pull(shard, key, into, work)
        else:
            push_pull(client, shard, key, gradient, into, hyper, work, *rest, **more)

    with patch.object(KVClient, "push_pull", wrong):
        yield


@contextmanager
def one_rank_sits_out(at: int) -> Iterator[None]:
    """One rank exchanges, and takes no step."""
    take = DistributedOptimizer._take_step

    def wrong(optimizer: DistributedOptimizer) -> None:
        if HERE.rank == 1 and optimizer._steps + 1 == at:
            optimizer._reducers.finish()
            return
        take(optimizer)

    with patch.object(DistributedOptimizer, "_take_step", wrong):
        yield


@contextmanager
def old_options() -> Iterator[None]:
    """Across the barrier, buckets are stepped with the options of the first step."""
    prepare, first = Stepper.prepare, dict[int, Any]()

    def wrong(stepper: Stepper) -> Any:
        return first.setdefault(id(stepper), prepare(stepper))

    with patch.object(Stepper, "prepare", wrong):
        yield


@contextmanager
def twice_across() -> Iterator[None]:
    """Across the barrier, buckets are stepped twice in one step."""
    prepare, counts = Stepper.prepare, dict[int, int]()

    def wrong(stepper: Stepper) -> Any:
        step = prepare(stepper)
        counts[id(stepper)] = counts.get(id(stepper), 0) + 1
        if counts[id(stepper)] != 8:
            return step

        def twice(bucket: Bucket) -> None:
            step(bucket)
            step(bucket)

        return twice

    with patch.object(Stepper, "prepare", wrong):
        yield


@contextmanager
def first_group() -> Iterator[None]:
    """The hub steps every group with the options of the first."""
    hyper = Reducers.hyper

    def wrong(reducers: Reducers, bucket: Bucket) -> Any:
        first = min(reducers.buckets, key=lambda one: one.spec.group)
        return hyper(reducers, first)

    with patch.object(Reducers, "hyper", wrong):
        yield
