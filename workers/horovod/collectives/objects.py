"""Python objects, sent as pickles.

Whoever can send a pickle can run code where it is opened. These functions open
what the other ranks of this very job sent, which all run the same script, so
ranks trust each other here as they do in Horovod. Beside `horovod.run`, nothing
else in this project opens a pickle. cloudpickle also takes what is defined
within a function: lambdas, and classes of the script itself.
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
    """Gives every rank the root's object; the ranks trust each other, see above.

    Args:
        obj: Anything that cloudpickle takes; only the root's counts.
        root_rank: A rank of the whole job, also where a process set is given.
        name: What ranks are matched by.
        process_set: Who takes part.

    Returns:
        `obj` itself on the root, a copy of the root's elsewhere.

    Raises:
        ValueError: The root or this rank is no member of the set.
        HorovodInternalError: Somebody is gone.
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
    """Gives every rank the objects of all, in rank order; as `broadcast_object` otherwise."""
    name, members, written = name or "allgather_object", checked(process_set), _written(obj)
    lengths = allgather_async(torch.tensor([written.numel()]), f"{name}.length", members)
    pickles = allgather_async(written, f"{name}.pickle", members)
    sizes = synchronize(lengths).tolist()
    return [_read(one) for one in synchronize(pickles).split(sizes)]


def _written(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _read(written: torch.Tensor) -> Any:
    return cloudpickle.loads(written.numpy().tobytes())
