"""What a training script uses, as `workers.NAME`."""

from __future__ import annotations

from typing import Any

import torch

from ps.errors import HubringError as HubringError
from ps.messages import ReduceOp as ReduceOp
from workers import context
from workers.collectives import allgather as allgather
from workers.collectives import allreduce as allreduce
from workers.collectives import barrier as barrier
from workers.collectives import broadcast as broadcast
from workers.context import shutdown as shutdown
from workers.optimizer import DistributedOptimizer as DistributedOptimizer
from workers.sampler import ShardedSampler as ShardedSampler


def init(*, aggregate: bool = False) -> None:
    """Finds this worker its place; call it first. See `workers.context.init` for the errors.

    Args:
        aggregate: This script needs the mean gradient in its hands, to clip it by its norm say, or the
            optimizer's state, to save it. A hub then only averages, as under `--aggregate`, and the
            script's own optimizer steps, as it does anyway on a ring and alone.
    """
    context.init(aggregate=aggregate)


def rank() -> int:
    """This worker's rank, from 0 to `size() - 1`."""
    return context.current().communicator.rank


def size() -> int:
    """How many workers the job began with."""
    return context.current().communicator.size


def local_rank() -> int:
    """This worker's rank among those on its host."""
    return context.current().placement.local_rank


def topology() -> str:
    """`hub`, `ring` or `local`; for logs, not for decisions."""
    return context.current().communicator.topology


def device() -> torch.device:
    """Where this worker's model should live: its own GPU under NCCL, else the CPU."""
    return context.current().device


def report(**metrics: Any) -> None:
    """Records metrics of this step: into `--record`'s file, the hub's status and the last line."""
    context.current().report(metrics)
