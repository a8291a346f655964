"""Train one PyTorch script through a hub or around a ring.

    import hubring

    hubring.init()
    optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    sampler = hubring.ShardedSampler(dataset)

The script does not choose the topology: the options of `ps-worker` or the settings do.
`ps`, `workers` and `protos` in this folder are links to the folders beside it,
so an installed Hubring is one package. `hubring.workers.api` defines the public names.
torch is imported at the first use of a public name, so `--help` stays fast.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hubring.ps.config.environment import spare_forks
from hubring.ps.core.packages import hidden_by

import_module("hubring.workers.torch_backend.registration").register_after_torch()

if TYPE_CHECKING:  # mypy cannot read an `__all__` that is built at run time
    from hubring.workers.api import *  # noqa: F403
    from hubring.workers.collectives.groups import *  # noqa: F403
    from hubring.workers.collectives.moving import *  # noqa: F403
    from hubring.workers.collectives.reductions import *  # noqa: F403

    __version__: str
else:  # with a visible __getattr__, a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version  # here: this import is ten times slower than the module

            return version("hubring")
        if name == "horovod":
            return import_module("hubring.horovod")
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'hubring' has no attribute {name!r}")
        if name != "__all__" and name not in _api().__all__:
            raise AttributeError(f"module 'hubring' has no attribute {name!r}; dir(hubring) lists the names")
        return getattr(_api(), name)


def __dir__() -> list[str]:
    return sorted(["horovod", "__version__", *_api().__all__])


@cache  # scripts look up names in every step
def _api() -> ModuleType:
    spare_forks()
    searched = not sys.flags.safe_path and sys.path  # otherwise sys.path[0] is not the script's folder
    if searched and (hidden := hidden_by(Path(sys.path[0]).resolve())):
        raise ImportError(hidden)
    return import_module("hubring.workers.api")
