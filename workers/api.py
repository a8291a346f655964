"""What a training script uses, as `workers.NAME`."""

from __future__ import annotations

from typing import Any

import torch

from ps.errors import HubringError as HubringError
from ps.messages import ReduceOp as ReduceOp
from workers import context
from workers.collectives import allgather as allgather
from workers.collectives import allgather_async as allgather_async
from workers.collectives import allreduce as allreduce
from workers.collectives import allreduce_ as allreduce_
from workers.collectives import allreduce_async as allreduce_async
from workers.collectives import allreduce_async_ as allreduce_async_
from workers.collectives import alltoall as alltoall
from workers.collectives import alltoall_async as alltoall_async
from workers.collectives import barrier as barrier
from workers.collectives import barrier_async as barrier_async
from workers.collectives import broadcast as broadcast
from workers.collectives import broadcast_ as broadcast_
from workers.collectives import broadcast_async as broadcast_async
from workers.collectives import broadcast_async_ as broadcast_async_
from workers.collectives import gather as gather
from workers.collectives import gather_async as gather_async
from workers.collectives import grouped_allgather as grouped_allgather
from workers.collectives import grouped_allgather_async as grouped_allgather_async
from workers.collectives import grouped_allreduce as grouped_allreduce
from workers.collectives import grouped_allreduce_ as grouped_allreduce_
from workers.collectives import grouped_allreduce_async as grouped_allreduce_async
from workers.collectives import grouped_allreduce_async_ as grouped_allreduce_async_
from workers.collectives import grouped_reduce_scatter as grouped_reduce_scatter
from workers.collectives import grouped_reduce_scatter_async as grouped_reduce_scatter_async
from workers.collectives import join as join
from workers.collectives import join_async as join_async
from workers.collectives import new_group as new_group
from workers.collectives import recv as recv
from workers.collectives import recv_async as recv_async
from workers.collectives import reduce as reduce
from workers.collectives import reduce_async as reduce_async
from workers.collectives import reduce_scatter as reduce_scatter
from workers.collectives import reduce_scatter_async as reduce_scatter_async
from workers.collectives import remove_group as remove_group
from workers.collectives import scatter as scatter
from workers.collectives import scatter_async as scatter_async
from workers.collectives import send as send
from workers.collectives import send_async as send_async
from workers.context import shutdown as shutdown
from workers.group import Group as Group
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
