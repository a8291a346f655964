"""What there is here of what Horovod can be built with.

There is no MPI in this project, so what asks for it is told no. Gloo and NCCL
are torch's, and the ring runs on them; the hub needs neither.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads.

    Raises:
        ValueError: Always, as Horovod does without MPI.
    """
    raise ValueError("there is no MPI here: run on the hub, or around a ring of Gloo or NCCL")


def mpi_enabled() -> bool:
    """False: MPI carries nothing."""
    return False


def mpi_built() -> bool:
    """False: there is no MPI."""
    return False


def gloo_enabled() -> bool:
    """Whether a ring may run on Gloo."""
    return gloo_built()


def gloo_built() -> bool:
    """Whether this torch has Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as one number, 22105 for 2.21.5; 0 if this torch has none."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version[0] * 10000 + version[1] * 100 + version[2]


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether this torch was built for CUDA."""
    return torch.backends.cuda.is_built() and torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch was built for ROCm."""
    return torch.version.hip is not None
