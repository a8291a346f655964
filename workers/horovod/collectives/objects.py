"""Exchange of Python objects as pickles.

Security: a process that sends a pickle can run code in the process that loads it. These functions load
pickles from the other ranks of the same job, which run the same script. So ranks trust each other, as in
Horovod. Besides `horovod.run`, no other code in this project loads a pickle. cloudpickle also accepts lambdas
and classes that the script itself defines.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch

from hubring.workers.horovod.collectives.allgather import allgather_async
from hubring.workers.horovod.collectives.broadcast import broadcast_
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.world.process_set import ProcessSet, checked, global_process_set
from hubring.workers.horovod.world.world import current


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copies the root's object to every rank. The ranks must trust each other; see the module's docstring.

    Args:
        obj: Any object that cloudpickle can pickle; only the root's object is used.
        root_rank: A rank of the whole job, even with a process set.
        name: Matches the operation across ranks.
        process_set: The ranks that take part.

    Returns:
        `obj` itself on the root, a copy of the root's object elsewhere.

    Raises:
        ValueError: The root or this rank is not a member of the set.
        HorovodInternalError: A rank is lost.
    """
    name = name or "broadcast_object"
    is_root = current().rank == root_rank
    written = _written(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([written.numel()]), root_rank, f"{name}.length", process_set)
    if not is_root:
        written = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast_(written, root_rank, f"{name}.pickle", process_set)
    return obj if is_root else _read(written)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in rank order. Otherwise like `broadcast_object`."""
    name, members, written = name or "allgather_object", checked(process_set), _written(obj)
    lengths = allgather_async(torch.tensor([written.numel()]), f"{name}.length", members)
    pickles = allgather_async(written, f"{name}.pickle", members)
    sizes = synchronize(lengths).tolist()
    return [_read(one) for one in synchronize(pickles).split(sizes)]


def _written(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _read(written: torch.Tensor) -> Any:
    return cloudpickle.loads(written.numpy().tobytes())
