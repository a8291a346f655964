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

from ps.config import spare_forks

spare_forks()

if TYPE_CHECKING:
    from workers.api import (
        DistributedOptimizer,
        HubringError,
        ReduceOp,
        ShardedSampler,
        allgather,
        allreduce,
        barrier,
        broadcast,
        device,
        init,
        local_rank,
        rank,
        report,
        shutdown,
        size,
        topology,
    )

__all__ = [
    "DistributedOptimizer",
    "HubringError",
    "ReduceOp",
    "ShardedSampler",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "device",
    "init",
    "local_rank",
    "rank",
    "report",
    "shutdown",
    "size",
    "topology",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'workers' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("workers.api"), name)
