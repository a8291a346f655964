"""What scripts ask of `horovod.common.util`: how Horovod was built, and small arithmetic."""

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
        ImportError: It is another framework's.
    """
    if ext_name != "horovod.torch":
        raise ImportError(f"extension {ext_name} is not here; there is horovod.torch")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Accepts any version: nothing here was compiled for one."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework is served: torch is."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether torch finds a GPU."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """As `hvd.mpi_built`."""
    return capability.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """As `hvd.gloo_built`."""
    return capability.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Whether there is NCCL."""
    return capability.nccl_built() > 0


def cuda_built(verbose: bool = False) -> bool:
    """As `hvd.cuda_built`."""
    return capability.cuda_built()


def rocm_built(verbose: bool = False) -> bool:
    """As `hvd.rocm_built`."""
    return capability.rocm_built()


def ddl_built(verbose: bool = False) -> bool:
    """As `hvd.ddl_built`."""
    return capability.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """As `hvd.ccl_built`."""
    return capability.ccl_built()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether so many ranks can do Adasum."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets variables of the environment within a block; None leaves one as it is."""
    earlier = environment()
    export({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        become(earlier)


def is_iterable(value: Any) -> bool:
    """Whether it can be iterated over."""
    return isinstance(value, Iterable)


def split_list(values: list[T], parts: int) -> list[list[T]]:
    """Cuts a list into so many pieces, as equal as can be; empty ones where there are fewer values."""
    each, rest = divmod(len(values), parts)
    starts = [index * each + min(index, rest) for index in range(parts + 1)]
    return [values[start:end] for start, end in pairwise(starts)]


def check_build() -> str:
    """What there is here, as `horovodrun --check-build` lays it out."""
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
    lines = ["Horovod v0.28.1's surface on Hubring:"]
    for title, found in parts.items():
        lines += [
            "",
            f"{title}:",
            *(f"    [{'X' if there else ' '}] {name}" for name, there in found.items()),
        ]
    return "\n".join(lines)
