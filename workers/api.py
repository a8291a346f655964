"""What a training script uses, as `hubring.NAME`."""

from __future__ import annotations

from typing import Any

import torch

from hubring.ps.core.errors import HubringError as HubringError
from hubring.ps.core.messages import ReduceOp as ReduceOp
from hubring.workers import collectives
from hubring.workers.collectives import *  # noqa: F403
from hubring.workers.optimizer.distributed import DistributedOptimizer as DistributedOptimizer
from hubring.workers.runtime import context
from hubring.workers.runtime.context import shutdown as shutdown
from hubring.workers.runtime.sampler import ShardedSampler as ShardedSampler

__all__ = [
    "DistributedOptimizer",
    "HubringError",
    "ReduceOp",
    "ShardedSampler",
    "device",
    "init",
    "local_rank",
    "rank",
    "report",
    "shutdown",
    "size",
    "topology",
]
__all__ += collectives.__all__


def init(*, aggregate: bool = False) -> None:
    """Finds this worker its place; call it first. See `hubring.workers.runtime.context.init` for the errors.

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
