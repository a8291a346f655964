"""How workers get their places in one job.

The law: the shards are told of a worker before the worker is told of the shards, so that nobody is ever
refused for being new.
"""

from __future__ import annotations

from typing import NamedTuple

from hubring.ps.coordinator.notifier import Notifier
from hubring.ps.coordinator.quorum import Quorum
from hubring.ps.coordinator.view_publisher import ViewPublisher
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Member
from hubring.ps.job.job import Job, Joiner


class Seat(NamedTuple):
    """A worker's place in a job that has begun; `late` if it came after the others."""

    member: Member
    world_size: int
    late: bool
    neighbours: int
    """Workers on its host, itself included."""


class Summons(NamedTuple):
    """A worker gets its place once it has brought a shard."""

    member: Member


class Joining:
    """The places of one job.

    Args:
        job: The job.
        quorum: Says when it may begin.
        views: Tells the shards who takes part.
        notifier: Where workers wait for the others.
        clock: When their leases begin.
    """

    def __init__(
        self, job: Job, quorum: Quorum, views: ViewPublisher, notifier: Notifier, clock: TimeSource
    ) -> None:
        self._job = job
        self._quorum = quorum
        self._views = views
        self._notifier = notifier
        self._clock = clock

    async def join(self, joiner: Joiner, patience: float) -> Seat | Summons | None:
        """Gives a worker its place; None if others are missing still after `patience` seconds.

        Raises:
            HubringError: The worker cannot take part; says why.
        """
        member = self._job.admit(joiner, self._clock.now())
        await self._notifier.announce()
        if self._job.colocated and not joiner.brings_shard:
            return Summons(member)
        await self._notifier.wait_for(lambda: self._quorum.complete, patience)
        if not self._quorum.complete:
            return None
        assert self._job.membership is not None
        await self._views.publish(self._job.membership)
        self._job.admit(joiner, self._clock.now())  # the same seat; its lease begins now
        late = member not in self._job.membership.view.members
        neighbours = sum(other.host == member.host for other in self._job.members)
        return Seat(member, self._job.membership.world_size, late, neighbours)
