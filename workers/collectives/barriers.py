"""Where members meet and exchange nothing: barriers, the end of uneven data, and groups."""

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
    """Returns once every member has called it, this rank's last step's exchange over."""
    if communicator is None:
        context.current().synchronize()
    barrier_async(name, group=group, communicator=communicator).wait()


def barrier_async(
    name: str | None = None,
    *,
    group: Group | None = None,
    communicator: Communicator | None = None,
) -> CollectiveWork:
    """Begins `barrier`, without a word on the last step's exchange."""
    return begin(Collective.BARRIER, [], name, group, communicator)


def join(*, communicator: Communicator | None = None) -> int:
    """Says that this rank has no more data, and returns once all have said so.

    Until then it takes part in what the others do: with zeros in reductions, where it counts in
    an average too, and without rows in what is gathered. What it began before is done first.

    Returns:
        The rank that was the last to join, the same on all.
    """
    return int(join_async(communicator=communicator).get())


def join_async(*, communicator: Communicator | None = None) -> CollectiveWork:
    """Begins `join`; nothing else may be called until it is done."""
    return begin(Collective.JOIN, [], None, None, communicator, then=lambda came: int(came[0]))


def new_group(ranks: Collection[int], *, communicator: Communicator | None = None) -> Group:
    """Makes a group of some ranks; every rank of the job calls it, with the same ones, members or not.

    Groups of the same ranks are one: calls in them meet.

    Raises:
        UsageError: A rank is named twice, or there is none of that number.
        ConfigError: The ranks name different members.
    """
    communicator = communicator or context.current().communicator
    group = Group(ranks, communicator.rank, communicator.size)
    communicator.collective(Call(Collective.GROUP, "new_group", splits=group.ranks)).wait()
    if group.included() and group.members:
        communicator.open_group(group.members)
    return group


def remove_group(group: Group, *, communicator: Communicator | None = None) -> None:
    """Gives a group back, on every rank of the job, once what all members have begun in it is done.

    What only some of them have begun fails, or waits until its deadline.

    Raises:
        UsageError: It was removed before.
        ConfigError: The ranks name different groups.
    """
    if group.removed:
        raise UsageError(f"{group} was removed before; remove it once")
    communicator = communicator or context.current().communicator
    communicator.collective(Call(Collective.GROUP, "remove_group", splits=group.ranks)).wait()
    group.removed = True
    if group.included() and group.members:
        call = Call(Collective.BARRIER, "remove_group", ranks=group.members)
        communicator.collective(call).wait()
        communicator.close_group(group.members)
