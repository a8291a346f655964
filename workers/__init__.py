"""Train one PyTorch script through a hub or around a ring.

    import workers

    workers.init()
    optimizer = workers.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    sampler = workers.ShardedSampler(dataset)

Nothing in the script names the topology: `ps-worker` does, or the settings.
The names are those of `workers.api`; torch is imported with the first of them,
so that `ps-worker --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    api = import_module("workers.api")
    if name not in api.__all__:
        raise AttributeError(f"module 'workers' has no attribute {name!r}; it has {', '.join(api.__all__)}")
    return getattr(api, name)
