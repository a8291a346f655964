"""One rank of one row: it steps when told to, says how long that took, and checks the result.

    gloo    torch.distributed's allreduce of every bucket, then torch's fused SGD here
    hub     push_pull of every bucket; the shard's SGD steps

Both hold the same buckets. An order is a line on standard input, the number of
steps; the reply is a line of JSON with each step's seconds and how many
elements came out wrong. Between orders a member is blocked, so that rows can
take turns on one machine without disturbing each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ps.messages import Collective
from ps.optim import hyper_of
from workers import context
from workers.bucketing import Bucket, make_buckets
from workers.staging import Allocate

PERIOD = 1024
"""Gradients repeat after so many elements, and so must the parameters."""
LR, MOMENTUM = 0.1, 0.9


class Side(Protocol):
    """How the ranks of a row exchange."""

    rank: int
    size: int
    buckets: list[Bucket]

    def barrier(self) -> None:
        """Returns once every rank is here."""

    def step(self) -> None:
        """From everyone's gradients to the new parameters."""


class Gloo:
    """What a script without Hubring would do."""

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
        self.buckets = _buckets(self._sgd, model, bucket_bytes, _zeros)

    def barrier(self) -> None:
        dist.barrier()

    def step(self) -> None:
        works = [dist.all_reduce(bucket.gradients, async_op=True) for bucket in self.buckets]
        for work, bucket in zip(works, self.buckets, strict=True):
            assert work is not None
            work.wait()
            bucket.gradients.div_(self.size)
        self._sgd.step()


class Hub:
    """What DistributedOptimizer does on a hub, without the backward pass."""

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self._communicator = context.current().communicator
        self.rank, self.size = self._communicator.rank, self._communicator.size
        sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        self._hyper = hyper_of(sgd.param_groups[0], "SGD")
        here = self._communicator
        self.buckets = make_buckets(
            sgd, model.named_parameters(), here.allocate, bucket_bytes, "SGD", here.allocate_values
        )
        self._communicator.attach(self.buckets)

    def barrier(self) -> None:
        work = self._communicator.collective(Collective.BARRIER, None, name="step")
        work.wait(self._communicator.timeout)

    def step(self) -> None:
        works = [self._communicator.push_pull(bucket, self._hyper) for bucket in self.buckets]
        for work in works:
            work.wait(self._communicator.timeout)


class Member:
    """Steps a side, and knows what must come out.

    The expected parameters come from torch's own SGD on one period of them.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        pattern = torch.arange(PERIOD) % 7 + 1.0
        self._gradient = pattern * (side.rank + 1)
        self._expected = nn.Parameter(torch.zeros(PERIOD))
        self._expected.grad = pattern * (side.size + 1) / 2  # the mean of 1, 2, ... n
        self._sgd = torch.optim.SGD([self._expected], lr=LR, momentum=MOMENTUM)

    def obey(self, steps: int) -> dict[str, object]:
        """Takes some steps; returns each one's seconds, and the wrong elements after the last."""
        seconds = [self._step() for _ in range(steps)]
        return {"seconds": seconds, "wrong": sum(self._wrong(bucket.values) for bucket in self._side.buckets)}

    def _step(self) -> float:
        for bucket in self._side.buckets:
            bucket.gradients.view(-1, PERIOD).copy_(self._gradient)
        self._side.barrier()
        began = time.perf_counter()
        self._side.step()
        seconds = time.perf_counter() - began
        self._sgd.step()
        return seconds

    def _wrong(self, values: Tensor) -> int:
        right = torch.isclose(values.view(-1, PERIOD), self._expected.detach(), rtol=1e-5, atol=0.0)
        return values.numel() - int(right.sum())


def model_of(megabytes: int, bucket_bytes: int) -> nn.Module:
    """Zeros, float32, in parameters of a bucket's size."""
    count, rest = divmod(megabytes * 2**20, bucket_bytes)
    if rest or bucket_bytes % (4 * PERIOD):
        raise SystemExit(f"{megabytes} MiB do not divide into buckets of {bucket_bytes} bytes")
    return nn.ParameterList(torch.zeros(bucket_bytes // 4) for _ in range(count))


def _buckets(
    sgd: torch.optim.Optimizer, model: nn.Module, bucket_bytes: int, allocate: Allocate
) -> list[Bucket]:
    return make_buckets(sgd, model.named_parameters(), allocate, bucket_bytes, "SGD")


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def main() -> None:
    """Obeys until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("gloo", "hub"))
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--bucket-bytes", type=int, required=True)
    parser.add_argument("--store", help="gloo: file in which the ranks find each other")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    options = parser.parse_args()
    model = model_of(options.megabytes, options.bucket_bytes)
    side: Side
    if options.side == "gloo":
        dist.init_process_group(
            "gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=options.size
        )
        side = Gloo(model, options.bucket_bytes)
    else:
        context.init()
        side = Hub(model, options.bucket_bytes)
    member = Member(side)
    for order in sys.stdin:
        print(json.dumps(member.obey(int(order))), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
