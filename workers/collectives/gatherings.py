"""Gather, allgather and alltoall: tensors of all members, concatenated or listed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hubring.ps.core.messages import Collective
from hubring.workers.collectives.groups import Group, begin, like, tensor_of, tensors_of
from hubring.workers.communicators.base import CollectiveWork, Communicator

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "gather",
    "gather_async",
    "grouped_allgather",
    "grouped_allgather_async",
]


def allgather(
    tensor: Tensor,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> Tensor:
    """Concatenates the members' tensors along the first dimension, the only one that may differ.

    A 0-d tensor counts as one row: the result has shape (size,).
    """
    return tensor_of(allgather_async(tensor, name, group=group, communicator=communicator))


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `allgather`."""
    return begin(Collective.ALLGATHER, [tensor], name, group, communicator)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor]:
    """As `allgather` of each tensor, in one exchange."""
    return tensors_of(grouped_allgather_async(tensors, name, group=group, communicator=communicator))


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `grouped_allgather`."""
    return begin(Collective.ALLGATHER, tensors, name, group, communicator, then=like(tensors))


def gather(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> list[Tensor] | None:
    """Returns the members' tensors in rank order on the root, else None. First dimensions may differ."""
    result: list[Tensor] | None = gather_async(
        tensor, root, name, group=group, communicator=communicator
    ).get()
    return result


def gather_async(
    tensor: Tensor,
    root: int = 0,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `gather`."""
    device = tensor.device

    def then(came: Sequence[Tensor]) -> list[Tensor] | None:
        return [one.to(device) for one in came] or None

    return begin(Collective.GATHER, [tensor], name, group, communicator, root=root, then=then)


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> tuple[Tensor, Tensor]:
    """Sends each member some of this rank's rows.

    Args:
        tensor: Rows for the first member, then for the second, and so on. The number of rows may
            differ between members; all other dimensions and the dtype must be the same.
        splits: Number of rows for each member; None: the same number for all.
        name: The name that calls are matched by.
        group: The members; None: all ranks.
        communicator: None uses the communicator of `hubring.init()`.

    Returns:
        The received rows in rank order, and the number of rows from each member (int64).
    """
    output, received = alltoall_async(tensor, splits, name, group=group, communicator=communicator).get()
    return output, received


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `alltoall`."""
    counts = () if splits is None else tuple(map(int, splits))
    device = tensor.device

    def then(came: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        output, received = came
        return output.to(device), received.to(device)

    return begin(Collective.ALLTOALL, [tensor], name, group, communicator, splits=counts, then=then)
