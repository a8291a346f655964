"""Sparse tensors: what ranks hold of them is gathered, and added up where it meets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hubring.workers.horovod.collectives.allgather import allgather_async
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.reduce_ops import Average, Sum
from hubring.workers.horovod.world.process_set import ProcessSet, checked, global_process_set


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begins to add up, or average, the ranks' sparse tensors of one shape.

    Args:
        tensor: In torch's COO layout; the ranks may hold different elements, or none.
        name: What ranks are matched by.
        op: `hvd.Average` or `hvd.Sum`.
        process_set: Who takes part.

    Returns:
        What to call for the result, a sparse tensor whose indices may repeat; it waits.

    Raises:
        ValueError: Another `op`, this rank is no member of the set, or an operation of that name is
            under way.
        HorovodInternalError: Ranks disagree, or somebody is gone; says who sent what.
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async: op is {op!r}; allowed: hvd.Average, hvd.Sum")
    members = checked(process_set)
    rows = tensor._indices().transpose(0, 1).contiguous()
    indices = allgather_async(rows, f"{name}.indices", members)
    values = allgather_async(tensor._values().contiguous(), f"{name}.values", members)

    def result() -> torch.Tensor:
        where, what = synchronize(indices).transpose(0, 1), synchronize(values)
        if op == Average:
            what = what / len(members.ranks)
        return torch.sparse_coo_tensor(where, what, tensor.shape, check_invariants=False)

    return result
