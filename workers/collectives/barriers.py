"""Collectives without tensors: barriers, joins (the end of uneven data) and groups."""

from __future__ import annotations

from collections.abc import Collection

from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Call, Collective
from hubring.workers.collectives.group import Group
from hubring.workers.collectives.start import begin
from hubring.workers.communicators.base import CollectiveWork, Communicator
from hubring.workers.runtime import context

__all__ = [
    "barrier",
    "barrier_async",
    "join",
    "join_async",
    "new_group",
    "remove_group",
]


def barrier(
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> None:
    """Returns once every member has called it. First waits for the exchange of this rank's last step."""
    if communicator is None:
        context.current().synchronize()
    barrier_async(name, group=group, communicator=communicator).wait()


def barrier_async(
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Starts `barrier`, without waiting for the exchange of the last step."""
    return begin(Collective.BARRIER, [], name, group, communicator)


def join(*, communicator: Communicator | None = None) -> int:
    """Declares that this rank has no more data. Returns once all ranks have joined.

    Until then the rank takes part in the other ranks' `allreduce` and `reduce` with zeros, which count
    in an average, and in their barriers. Any other collective would miss this rank's part, so it raises
    ConfigError on the ranks that call it. Collectives that this rank started before finish first.

    Returns:
        The last rank to join, the same on all ranks.
    """
    return int(join_async(communicator=communicator).get())


def join_async(*, communicator: Communicator | None = None) -> CollectiveWork:
    """Starts `join`. Call no other collective until it is done."""
    return begin(Collective.JOIN, [], None, None, communicator, then=lambda came: int(came[0]))


def new_group(ranks: Collection[int], *, communicator: Communicator | None = None) -> Group:
    """Makes a group of some ranks. Every rank of the job must call it with the same `ranks`.

    Groups with the same ranks are equivalent: their calls match each other.

    Raises:
        UsageError: `ranks` is empty, repeats a rank, or has a rank that does not exist.
        ConfigError: The callers pass different ranks.
    """
    communicator = communicator or context.current().communicator
    group = Group(ranks, communicator.rank, communicator.size)
    communicator.collective(Call(Collective.GROUP, "new_group", splits=group.ranks)).wait()
    if group.included() and group.members:
        communicator.open_group(group.members)
    return group


def remove_group(group: Group, *, communicator: Communicator | None = None) -> None:
    """Removes a group once the collectives that all members started are done. Every rank must call it.

    A collective that only some members started fails, or waits until its deadline.

    Raises:
        UsageError: The group was already removed.
        ConfigError: The callers pass different groups.
    """
    if group.removed:
        raise UsageError(f"{group} was already removed: call remove_group() once")
    communicator = communicator or context.current().communicator
    communicator.collective(Call(Collective.GROUP, "remove_group", splits=group.ranks)).wait()
    group.removed = True
    if group.included() and group.members:
        call = Call(Collective.BARRIER, "remove_group", ranks=group.members)
        communicator.collective(call).wait()
        communicator.close_group(group.members)
