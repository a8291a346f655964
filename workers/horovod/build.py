"""The names of `horovod.common` that scripts use: build information, small helpers, and HorovodBasics.

HorovodBasics has the functions that do not depend on a framework, as methods of one object.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from packaging.version import parse

from hubring.ps.config.environment import become, environment, export
from hubring.workers.horovod import lifecycle, world
from hubring.workers.horovod.collectives import operation
from hubring.workers.horovod.lifecycle import ccl_built as ccl_built
from hubring.workers.horovod.lifecycle import cuda_built as cuda_built
from hubring.workers.horovod.lifecycle import ddl_built as ddl_built
from hubring.workers.horovod.lifecycle import gloo_built as gloo_built
from hubring.workers.horovod.lifecycle import mpi_built as mpi_built
from hubring.workers.horovod.lifecycle import rocm_built as rocm_built

T = TypeVar("T")


def check_extension(ext_name: str, *_: Any) -> None:
    """Accepts `horovod.torch`.

    Raises:
        ImportError: The extension is for another framework.
    """
    if ext_name != "horovod.torch":
        raise ImportError(f"Hubring does not provide the extension {ext_name}; it provides horovod.torch")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Accepts any version, since nothing here is compiled for a version."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework is supported; only torch is."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether torch finds a GPU."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def nccl_built(verbose: bool = False) -> bool:
    """Whether this torch has NCCL."""
    return lifecycle.nccl_built() > 0


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Adasum works with this number of ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether the version `ver` is `target` or later.

    Raises:
        ValueError: `target` is not of the form major.minor.patch, or an argument is not a string.
    """
    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(
            f"versions {ver!r} and {target!r}: expected strings, the second as major.minor.patch"
        )
    return parse(ver) >= parse(target)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Returns a function that gets the reduction from `op`, or from the older `average`.

    Args:
        reduce_ops: Has the constants Average and Sum.
    """

    def chosen(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if average is not None:
            warnings.warn("average= is deprecated; use op=", DeprecationWarning, stacklevel=3)
        given = op if average is None else reduce_ops.Average if average else reduce_ops.Sum
        return int(reduce_ops.Average if given is None else given)

    return chosen


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables within a block; None leaves a variable unchanged."""
    earlier = environment()
    export({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        become(earlier)


def is_iterable(value: Any) -> bool:
    """Whether the value is iterable."""
    return isinstance(value, Iterable)


def split_list(values: list[T], parts: int) -> list[list[T]]:
    """Splits a list into `parts` pieces whose lengths differ by at most 1."""
    each, rest = divmod(len(values), parts)
    starts = [index * each + min(index, rest) for index in range(parts + 1)]
    return [values[start:end] for start, end in pairwise(starts)]


def check_build() -> str:
    """Returns the available features in the layout of `horovodrun --check-build`."""
    parts = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Available Controllers": {"Hub": True, "MPI": mpi_built(), "Gloo": gloo_built()},
        "Available Tensor Operations": {
            "Hub": True,
            "NCCL": nccl_built(),
            "DDL": ddl_built(),
            "CCL": ccl_built(),
            "MPI": mpi_built(),
            "Gloo": gloo_built(),
        },
    }
    lines = ["Horovod v0.28.1's API on Hubring:"]
    for title, found in parts.items():
        lines += [
            "",
            f"{title}:",
            *(f"    [{'X' if there else ' '}] {name}" for name, there in found.items()),
        ]
    return "\n".join(lines)


_OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_FUNCTIONS = (
    *("init", "shutdown", "is_initialized", "start_timeline", "stop_timeline"),
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"),
    *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built"),
    *("ddl_built", "ccl_built", "cuda_built", "rocm_built"),
)


class HorovodBasics:
    """Horovod's world for one framework's extension. All objects show the same world.

    Args:
        pkg_path: Accepted, but has no effect: there is no compiled extension to load.
        args: As `pkg_path`.
    """

    vars().update({name: getattr(operation, name) for name in _OPS})
    vars().update({name: staticmethod(getattr(lifecycle, name)) for name in _FUNCTIONS})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, pkg_path: str = "", *args: Any) -> None: ...

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Returns the ranks of every process set by its number; 0 is the set of all ranks."""
        added = {one.process_set_id: list(ranks) for ranks, one in world.current().process_sets.items()}
        numbered = {number: ranks for number, ranks in added.items() if number is not None}
        return {0: world.global_process_set.ranks, **numbered}
