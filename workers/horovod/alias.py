"""Makes `import horovod.torch as hvd` import `hubring.workers.horovod`, only in this process.

`horovod.keras` and `horovod.tensorflow.keras` are for Keras 3 on torch.

A finder at the front of `sys.meta_path` handles `horovod` and its submodules. Each module shows the objects
of the files here under the names that Horovod's users import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hubring.ps.config.environment import export
from hubring.workers.horovod.world import Neighbourhood, variables
from hubring.workers.launchers.placement import Placement

PACKAGE = "hubring.workers.horovod"
VIEWS: dict[str, tuple[str, ...]] = {
    "horovod": ("run_function",),
    "horovod.torch": ("",),
    "horovod.torch.compression": ("collectives.compression",),
    "horovod.torch.elastic": ("elastic",),
    "horovod.torch.elastic.sampler": ("elastic.sampler",),
    "horovod.torch.elastic.state": ("elastic.state",),
    "horovod.torch.functions": ("functions",),
    "horovod.torch.mpi_ops": ("collectives.mpi_ops",),
    "horovod.torch.optimizer": ("optimizer",),
    "horovod.torch.sync_batch_norm": ("sync_batch_norm",),
    "horovod.common": (),
    "horovod.common.basics": ("basics",),
    "horovod.common.elastic": ("elastic.state", "elastic.notification"),
    "horovod.common.exceptions": ("errors",),
    "horovod.common.process_sets": ("world",),
    "horovod.common.util": ("basics",),
    "horovod.data": ("data",),
    "horovod.data.data_loader_base": ("data",),
    "horovod.keras": ("keras",),
    "horovod.keras.callbacks": ("keras_callbacks",),
    "horovod.runner": ("run_function",),
    "horovod.runner.elastic": (),
    "horovod.runner.elastic.worker": ("elastic.notification",),
    "horovod.tensorflow": (),
    "horovod.tensorflow.keras": ("keras",),
    "horovod.tensorflow.keras.callbacks": ("keras_callbacks",),
    "horovod.version": (),
}
"""Horovod's modules to ours whose names they show: those of `__all__`, or all public ones and `_basics`."""

WHOLE = ("horovod.torch", "horovod.torch.elastic")
"""Packages that import their modules: scripts write `hvd.mpi_ops.Sum` after `import horovod.torch as hvd`."""

KERAS_3 = (
    "Hubring trains Keras 3 on torch: set KERAS_BACKEND=torch, and use keras instead of tensorflow"
    " (workers/examples/FRAMEWORKS.md)"
)
"""The end of errors about TensorFlow."""

VERSION = "0.28.1"
"""The Horovod release whose API this is."""


class HorovodFinder(MetaPathFinder, Loader):
    """Finds and creates Horovod's modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Handles only Horovod's names.

        Raises:
            ModuleNotFoundError: Hubring does not provide this module of Horovod.
        """
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in VIEWS:
            known = ", ".join(VIEWS)
            raise ModuleNotFoundError(f"Hubring has no {fullname}; expected one of {known}", name=fullname)
        is_package = any(other.startswith(f"{fullname}.") for other in VIEWS)
        return ModuleSpec(fullname, self, origin=__name__, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # the default module

    def exec_module(self, module: ModuleType) -> None:
        """Adds the names to the module."""
        for source in VIEWS[module.__name__]:
            shown = vars(import_module(f".{source}", PACKAGE))
            names = shown.get("__all__") or [name for name in shown if name[0] != "_" or name == "_basics"]
            module.__dict__.update({name: shown[name] for name in names})
        module.__dict__["__version__"] = VERSION
        if module.__name__ == "horovod.tensorflow":
            module.__dict__["__getattr__"] = _no_graphs
        if module.__name__ in WHOLE:
            for name in VIEWS:
                if name.rpartition(".")[0] == module.__name__:
                    import_module(name)


def _no_graphs(name: str) -> Any:
    raise AttributeError(
        f"Hubring has no horovod.tensorflow.{name}, only horovod.tensorflow.keras. {KERAS_3}; for graphs of"
        " TensorFlow, use Horovod itself"
    )


def tell_place(placement: Placement) -> None:
    """Sets HOROVOD_RANK and the like, as `horovodrun` does, if rank and size are known before `init`."""
    if placement.rank is None or placement.size is None:
        return
    around = Neighbourhood(placement.local_rank, placement.local_size, placement.node_rank)
    export(variables(placement.rank, placement.size, around))


def install() -> None:
    """Installs the finder once, and removes Horovod modules that were imported before from `sys.modules`."""
    if any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]
    sys.meta_path.insert(0, HorovodFinder())
