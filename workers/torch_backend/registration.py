"""Makes the backend's name known to torch.distributed. Nothing else is imported until a group is made.

From torch 2.14 on, the entry point group `torch.distributed.backends` calls `register` when a script asks for
"hubring". Before that, `import hubring` calls it, also where a script imports torch later. An entry point of
the group `torch.backends` was rejected: each `import torch` of the environment would end if it failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from hubring.ps.config.environment import spare_forks

NAME = "hubring"


def register() -> None:
    """Registers the backend, and addresses `hubring://HOST:PORT`. A second call changes nothing."""
    from torch import distributed

    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    distributed.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler(NAME, _meet)


def register_after_torch() -> None:
    """Registers now if torch is imported, else once it is."""
    if "torch.distributed" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Finds torch.distributed where Python does, and registers the backend at the end of its import."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _make_group(options: Any, _: object) -> Any:
    spare_forks()
    from hubring.workers.torch_backend.group import make_group

    return make_group(options)


def _meet(url: str, **more: Any) -> Iterator[tuple[Any, int, int]]:
    spare_forks()
    from hubring.workers.torch_backend.job import meet

    yield meet(url, **more)
    raise RuntimeError("hubring:// cannot meet again: restart the job")
