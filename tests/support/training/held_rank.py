"""A rank whose answers a test delays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from hubring.ps.core.errors import DeadlineExceeded
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.training_scripts import batches, build, plain_step, wrap

Side = Literal["server", "worker"]
Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None]
SOON = 0.01
"""Seconds after which a wait for a delayed answer ends."""


class HeldRank(FakeRank):
    """A single rank whose answers are delayed while `holding` is set."""

    def __init__(self, steps_on: Side = "server") -> None:
        super().__init__(FakeHub(1, steps_on))
        self.holding = False
        self.held: dict[int, Callable[[], None]] = {}

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        if not self.holding:
            return super().push_pull(bucket, hyper)
        self.log.append(f"push {bucket.spec.index}")
        work = Work(f"bucket {bucket.spec.index}")

        def answer() -> None:
            super(HeldRank, self).push_pull(bucket, hyper).wait(0)
            work.complete_part()

        self.held[bucket.spec.index] = answer
        return work

    def let_through(self, *indices: int) -> None:
        for index in indices or list(self.held):
            self.held.pop(index)()


def crossing(rank: FakeRank, **kwargs: Any) -> tuple[nn.Sequential, DistributedOptimizer]:
    """Returns a model of three layers in about five buckets, after its first step."""
    model = build()
    optimizer = wrap(model, rank, cross_barrier=True, **kwargs)
    plain_step(model, optimizer, batches()[0])
    return model, optimizer


def under_way(rank: HeldRank, **kwargs: Any) -> tuple[nn.Sequential, DistributedOptimizer]:
    """Returns the same after its second step, whose answers are delayed."""
    model, optimizer = crossing(rank, **kwargs)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    return model, optimizer


def bucket_of(optimizer: DistributedOptimizer, name: str) -> int:
    (index,) = [
        bucket.spec.index
        for bucket in optimizer._trained.reducer.buckets
        if name in {tensor.name for tensor in bucket.spec.tensors}
    ]
    return index


def in_flight(optimizer: DistributedOptimizer) -> list[str]:
    """Returns the parameters whose exchange is under way."""
    reducer = optimizer._trained.reducer
    buckets = [one for one in reducer.buckets if reducer.exchange.has_left(one)]
    return sorted(tensor.name for bucket in buckets for tensor in bucket.spec.tensors)


def waits(action: Callable[[], object]) -> bool:
    """Whether a call times out on a delayed answer."""
    try:
        action()
    except DeadlineExceeded:
        return True
    return False
