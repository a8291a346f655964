"""Sparse tensors: an allgather of indices and values; repeated indices add up."""

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
    """Starts the sum or the average of sparse tensors with the same shape.

    Args:
        tensor: In torch's COO layout. The ranks can have different elements, or none.
        name: Matches the operation across ranks.
        op: `hvd.Average` or `hvd.Sum`.
        process_set: The ranks that take part.

    Returns:
        A function that waits and returns the result, a sparse tensor whose indices can repeat.

    Raises:
        ValueError: `op` is another reduction, this rank is not a member of the set, or an operation with this
            name is running.
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async: op is {op!r}; expected one of hvd.Average, hvd.Sum")
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
