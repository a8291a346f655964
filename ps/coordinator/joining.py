"""How workers join one job.

Law: the shards know a worker before the worker knows the shards, so that no shard refuses a new worker.
"""

from __future__ import annotations

from typing import NamedTuple

from hubring.ps.coordinator.notifier import Notifier
from hubring.ps.coordinator.quorum import Quorum
from hubring.ps.coordinator.view_publisher import ViewPublisher
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Member
from hubring.ps.job.job import Job
from hubring.ps.job.joiner import Joiner


class Seat(NamedTuple):
    """A worker's membership in a job that has begun; `late` if it joined after the start."""

    member: Member
    world_size: int
    late: bool
    neighbours: int
    """Workers on the same host, including this worker."""


class Summons(NamedTuple):
    """The answer to a worker that must start a shard before it can join."""

    member: Member


class Joining:
    """Lets workers join one job.

    Args:
        job: The job.
        quorum: Decides when the job can begin.
        views: Publishes the members to the shards.
        notifier: Where workers wait for the others.
        clock: The source of the time.
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
        """Admits a worker; returns None if other workers are still missing after `patience` seconds.

        Raises:
            HubringError: The worker cannot join.
        """
        member = self._job.admit(joiner, self._clock.now(), waits=True)
        if self._job.started:  # earlier joins change nothing that another worker waits for
            await self._notifier.announce()
        if self._job.colocated and not joiner.brings_shard:
            return Summons(member)
        await self._notifier.wait_for(lambda: self._quorum.complete, patience)
        if not self._quorum.complete:
            return None
        assert self._job.membership is not None
        await self._views.publish(self._job.membership)
        self._job.admit(joiner, self._clock.now())  # the same rank; its lease begins now
        late = member not in self._job.membership.view.members
        neighbours = sum(other.host == member.host for other in self._job.members)
        return Seat(member, self._job.membership.world_size, late, neighbours)
