"""Train one PyTorch script through a hub or around a ring.

    import hubring

    hubring.init()
    optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    sampler = hubring.ShardedSampler(dataset)

The script never names the topology: `ps-worker` does, or the settings.
`ps`, `workers` and `protos` in this folder are links to the folders beside it,
so an installed Hubring is one package. The names that scripts use live in
`hubring.workers.api`. The first one used imports torch, so `--help` is quick.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hubring.ps.config.environment import spare_forks
from hubring.ps.core.shadowing import hidden_by

spare_forks()

if TYPE_CHECKING:
    from hubring.workers.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'hubring' has no attribute {name!r}")
    api = _api()
    if name == "__all__":
        return api.__all__
    if name not in api.__all__:
        raise AttributeError(f"module 'hubring' has no attribute {name!r}; it has {', '.join(api.__all__)}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_api().__all__})


@cache  # scripts ask for a name in every step
def _api() -> ModuleType:
    if hidden := hidden_by(Path(sys.path[0]).resolve()):
        raise ImportError(hidden)
    return import_module("hubring.workers.api")
