"""Train one PyTorch script through a hub or around a ring.

    import workers

    workers.init()
    optimizer = workers.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    sampler = workers.ShardedSampler(dataset)

Nothing in the script names the topology: `ps-worker` does, or the settings.
The names live in `workers.api`; torch is imported with the first one used, so
that `ps-worker --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ps.config.environment import spare_forks

spare_forks()

if TYPE_CHECKING:
    from workers.api import (
        DistributedOptimizer,
        Group,
        HubringError,
        ReduceOp,
        ShardedSampler,
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        barrier_async,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        device,
        gather,
        gather_async,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reduce_scatter,
        grouped_reduce_scatter_async,
        init,
        join,
        join_async,
        local_rank,
        new_group,
        rank,
        recv,
        recv_async,
        reduce,
        reduce_async,
        reduce_scatter,
        reduce_scatter_async,
        remove_group,
        report,
        scatter,
        scatter_async,
        send,
        send_async,
        shutdown,
        size,
        topology,
    )

__all__ = [
    "DistributedOptimizer",
    "Group",
    "HubringError",
    "ReduceOp",
    "ShardedSampler",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "device",
    "gather",
    "gather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reduce_scatter",
    "grouped_reduce_scatter_async",
    "init",
    "join",
    "join_async",
    "local_rank",
    "new_group",
    "rank",
    "recv",
    "recv_async",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "remove_group",
    "report",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
    "shutdown",
    "size",
    "topology",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'workers' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("workers.api"), name)
