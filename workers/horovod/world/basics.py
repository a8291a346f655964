"""HorovodBasics: the functions that do not depend on a framework, as methods of one object."""

from __future__ import annotations

from typing import Any

from hubring.workers.horovod import reduce_ops
from hubring.workers.horovod.world import capability, lifecycle, process_set, ranks
from hubring.workers.horovod.world.world import current


class HorovodBasics:
    """Horovod's world for one framework's extension. All objects show the same world.

    Args:
        pkg_path: Accepted, but has no effect: there is no compiled extension to load.
        args: As `pkg_path`.
    """

    Average = reduce_ops.Average
    Sum = reduce_ops.Sum
    Adasum = reduce_ops.Adasum
    Min = reduce_ops.Min
    Max = reduce_ops.Max
    Product = reduce_ops.Product

    init = staticmethod(lifecycle.init)
    shutdown = staticmethod(lifecycle.shutdown)
    is_initialized = staticmethod(lifecycle.is_initialized)
    start_timeline = staticmethod(lifecycle.start_timeline)
    stop_timeline = staticmethod(lifecycle.stop_timeline)

    rank = staticmethod(ranks.rank)
    size = staticmethod(ranks.size)
    local_rank = staticmethod(ranks.local_rank)
    local_size = staticmethod(ranks.local_size)
    cross_rank = staticmethod(ranks.cross_rank)
    cross_size = staticmethod(ranks.cross_size)
    is_homogeneous = staticmethod(ranks.is_homogeneous)

    mpi_threads_supported = staticmethod(capability.mpi_threads_supported)
    mpi_enabled = staticmethod(capability.mpi_enabled)
    mpi_built = staticmethod(capability.mpi_built)
    gloo_enabled = staticmethod(capability.gloo_enabled)
    gloo_built = staticmethod(capability.gloo_built)
    nccl_built = staticmethod(capability.nccl_built)
    ddl_built = staticmethod(capability.ddl_built)
    ccl_built = staticmethod(capability.ccl_built)
    cuda_built = staticmethod(capability.cuda_built)
    rocm_built = staticmethod(capability.rocm_built)

    def __init__(self, pkg_path: str = "", *args: Any) -> None: ...

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Returns the ranks of every process set by its number; 0 is the set of all ranks."""
        added = {one.process_set_id: list(ranks) for ranks, one in current().process_sets.items()}
        numbered = {number: ranks for number, ranks in added.items() if number is not None}
        return {0: process_set.global_process_set.ranks, **numbered}
