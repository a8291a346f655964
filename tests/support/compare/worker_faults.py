"""Faults of workers: in what they send, and in the steps that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from hubring.ps.client.client import KVClient, PreparedPush
from hubring.ps.core.types import HyperTable
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.optimizer.stepping import BucketStepper
from hubring.workers.reducer.groups import ParameterGroups
from tests.support.compare.audited import HERE

Plant = Callable[[], Any]
"""Returns a context in which a fault exists."""


def instead(owner: type, name: str, wrong: Callable[..., Any]) -> Any:
    """Returns a context in which calls of a method go to `wrong`, which gets the method first."""
    method = getattr(owner, name)
    return patch.object(owner, name, lambda *given, **more: wrong(method, *given, **more))


def pushing(which: Callable[[int, int, int], bool], factor: float | None = None) -> Any:
    """Workers pull instead of pushing, or push their gradient times a factor.

    Args:
        which: Gets the rank, the key, and the number of the push to it.
        factor: Of the gradient; None: nothing is pushed.
    """
    numbers = Counter[tuple[int, int]]()

    def wrong(
        push_pull: Any, client: KVClient, shard: int, push: PreparedPush, *rest: Any, **more: Any
    ) -> None:
        rank, key = client.sender.rank, push.header.key
        numbers[rank, key] += 1
        if which(rank, key, numbers[rank, key]):
            if factor is None:
                client.pull(shard, key, push.into, rest[1])
                return
            gradient = torch.frombuffer(push.header._payload, dtype=push.into.dtype)
            push = client.prepare(key, gradient * factor, push.into)
        push_pull(client, shard, push, *rest, **more)

    return instead(KVClient, "push_pull", wrong)


def one_rank_sits_out(at: int) -> Any:
    """One rank exchanges, and takes no step."""

    def wrong(take: Any, optimizer: DistributedOptimizer, reducer: Any) -> None:
        if HERE.rank == 1 and optimizer._steps + 1 == at:
            optimizer._trained.reducer.exchange.finish()
        else:
            take(optimizer, reducer)

    return instead(DistributedOptimizer, "_take_step", wrong)


def old_options() -> Any:
    """Across the barrier, buckets are stepped with the options of the first step."""
    first = dict[int, Any]()
    return instead(
        BucketStepper, "prepare", lambda prepare, stepper: first.setdefault(id(stepper), prepare(stepper))
    )


def twice_across() -> Any:
    """Across the barrier, buckets are stepped twice in one step."""
    counts = Counter[int]()

    def wrong(prepare: Any, stepper: BucketStepper) -> Any:
        step = prepare(stepper)
        counts[id(stepper)] += 1

        def twice(bucket: Bucket) -> None:
            step(bucket)
            step(bucket)

        return twice if counts[id(stepper)] == 8 else step

    return instead(BucketStepper, "prepare", wrong)


def first_group() -> Any:
    """The hub steps every group with the options of the first."""
    seen = dict[int, Any]()

    def wrong(hyper: Any, groups: ParameterGroups, bucket: Bucket) -> Any:
        found = hyper(groups, bucket)
        return seen.setdefault(id(groups), found.rows[0] if isinstance(found, HyperTable) else found)

    return instead(ParameterGroups, "hyper", wrong)
