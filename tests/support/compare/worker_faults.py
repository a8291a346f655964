"""Faults of workers: in what they send, and in the steps that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hubring.ps.client.client import KVClient
from hubring.ps.core.types import HyperTable
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.optimizer.stepping import BucketStepper
from hubring.workers.reducer.groups import ParameterGroups
from tests.support.compare.audited import HERE


@contextmanager
def pushing(which: Callable[[int, int, int], bool], factor: float | None = None) -> Iterator[None]:
    """Workers pull instead of pushing, or push their gradient times a factor.

    Args:
        which: Gets the rank, the key, and the number of the push to it.
        factor: Of the gradient; None: nothing is pushed.
    """
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
        chosen = which(rank, key, numbers[rank, key])
        if chosen and factor is None:
            client.pull(shard, key, into, work)
            return
        pushed = gradient * factor if chosen else gradient
        push_pull(client, shard, key, pushed, into, hyper, work, *rest, **more)

    with patch.object(KVClient, "push_pull", wrong):
        yield


@contextmanager
def one_rank_sits_out(at: int) -> Iterator[None]:
    """One rank exchanges, and takes no step."""
    take = DistributedOptimizer._take_step

    def wrong(optimizer: DistributedOptimizer, reducer: Any) -> None:
        if HERE.rank == 1 and optimizer._steps + 1 == at:
            optimizer._trained.reducer.exchange.finish()
            return
        take(optimizer, reducer)

    with patch.object(DistributedOptimizer, "_take_step", wrong):
        yield


@contextmanager
def old_options() -> Iterator[None]:
    """Across the barrier, buckets are stepped with the options of the first step."""
    prepare, first = BucketStepper.prepare, dict[int, Any]()

    def wrong(stepper: BucketStepper) -> Any:
        return first.setdefault(id(stepper), prepare(stepper))

    with patch.object(BucketStepper, "prepare", wrong):
        yield


@contextmanager
def twice_across() -> Iterator[None]:
    """Across the barrier, buckets are stepped twice in one step."""
    prepare, counts = BucketStepper.prepare, dict[int, int]()

    def wrong(stepper: BucketStepper) -> Any:
        step = prepare(stepper)
        counts[id(stepper)] = counts.get(id(stepper), 0) + 1
        if counts[id(stepper)] != 8:
            return step

        def twice(bucket: Bucket) -> None:
            step(bucket)
            step(bucket)

        return twice

    with patch.object(BucketStepper, "prepare", wrong):
        yield


@contextmanager
def first_group() -> Iterator[None]:
    """The hub steps every group with the options of the first."""
    hyper, seen = ParameterGroups.hyper, dict[int, Any]()

    def wrong(groups: ParameterGroups, bucket: Bucket) -> Any:
        found = hyper(groups, bucket)
        return seen.setdefault(id(groups), found.rows[0] if isinstance(found, HyperTable) else found)

    with patch.object(ParameterGroups, "hyper", wrong):
        yield
