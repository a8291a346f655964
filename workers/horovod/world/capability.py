"""Which of Horovod's build options are available.

Hubring has no MPI. The ring runs on torch's Gloo and NCCL; the hub needs neither.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod does without MPI.

    Raises:
        ValueError: Always.
    """
    raise ValueError("Hubring has no MPI; use a hub, or a ring on Gloo or NCCL")


def mpi_enabled() -> bool:
    """Returns False, since Hubring has no MPI."""
    return False


def mpi_built() -> bool:
    """Returns False, since Hubring has no MPI."""
    return False


def gloo_enabled() -> bool:
    """Whether a ring can run on Gloo."""
    return gloo_built()


def gloo_built() -> bool:
    """Whether this torch has Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built() -> int:
    """Returns NCCL's version as a number, for example 22105 for 2.21.5; 0 if this torch has no NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version[0] * 10000 + version[1] * 100 + version[2]


def ddl_built() -> bool:
    """Returns False, since Hubring does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Returns False, since Hubring does not use Intel's oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether this torch was built for CUDA."""
    return torch.backends.cuda.is_built() and torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch was built for ROCm."""
    return torch.version.hip is not None
