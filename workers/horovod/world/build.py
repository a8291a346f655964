"""The functions of `horovod.common.util` that scripts use: build information and small helpers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch

from hubring.ps.config.environment import become, environment, export
from hubring.workers.horovod.world import capability

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


def mpi_built(verbose: bool = False) -> bool:
    """See `hvd.mpi_built`."""
    return capability.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """See `hvd.gloo_built`."""
    return capability.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Whether this torch has NCCL."""
    return capability.nccl_built() > 0


def cuda_built(verbose: bool = False) -> bool:
    """See `hvd.cuda_built`."""
    return capability.cuda_built()


def rocm_built(verbose: bool = False) -> bool:
    """See `hvd.rocm_built`."""
    return capability.rocm_built()


def ddl_built(verbose: bool = False) -> bool:
    """See `hvd.ddl_built`."""
    return capability.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """See `hvd.ccl_built`."""
    return capability.ccl_built()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Adasum works with this number of ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


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
