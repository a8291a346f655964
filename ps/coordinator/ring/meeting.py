"""Where the members of a ring that heals agree on its next generation.

Law: a member is lost at once if its connection has closed while the others meet because their ring broke. It
has lost its connections to the server and to the ring, so this is no failure of one network path, and the
usual grace would only delay the others. If all that came are between two steps, to let newcomers in, the ring
need not have broken, and the member keeps its grace. A member that is silent but connected has its lease.
"""

from __future__ import annotations

import logging
from functools import partial

from hubring.ps.coordinator.notifier import Notifier
from hubring.ps.coordinator.view_publisher import ViewPublisher
from hubring.ps.core.errors import ConfigError, JobFailed
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Member, Sender
from hubring.ps.job.generations import Generation, Generations
from hubring.ps.job.job import Job

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""How often a meeting looks who is lost."""


class Meeting:
    """The meetings of one job.

    Args:
        job: The job.
        views: Publishes the members.
        notifier: Where the members wait for each other.
        clock: The source of the time.
    """

    def __init__(self, job: Job, views: ViewPublisher, notifier: Notifier, clock: TimeSource) -> None:
        self._job, self._views, self._notifier, self._clock = job, views, notifier, clock

    async def regroup(
        self, sender: Sender, generation: int, note: str, seconds: float, *, boundary: bool
    ) -> Generation | None:
        """Waits for the next generation with this worker; returns None after `seconds` without one.

        Args:
            sender: The worker.
            generation: The generation that it leaves; 0 for none.
            note: For the other members.
            seconds: How long to wait.
            boundary: Whether the worker is between two steps.

        Raises:
            Fenced: The worker is no longer a member of the job.
            JobFailed: The job has failed, or is not a ring that heals.
            ConfigError: This worker cannot enter any more.
        """
        generations, membership = self._job.generations, self._job.membership
        if not generations.heals or membership is None:
            raise JobFailed("this job does not heal: start all workers with --min-workers")
        member = membership.member(sender)
        if not self._has_entered(generations, member, generation):
            generations.come(member, note, self._clock.now(), boundary=boundary)
        until = self._clock.now() + seconds
        while not self._has_entered(generations, member, generation):
            membership.member(sender)
            if self._job.failure is not None:
                raise JobFailed(str(self._job.failure))
            await self._look(generations)
            if self._has_entered(generations, member, generation):
                break
            if (left := until - self._clock.now()) <= 0:
                return None
            entered = partial(self._has_entered, generations, member, generation)
            await self._notifier.wait_for(entered, min(left, LOOK_SECONDS))
        return generations.current

    async def _look(self, generations: Generations) -> None:
        """Removes lost members, and begins the next generation if no other member is awaited."""
        membership = self._job.membership
        assert membership is not None
        now = self._clock.now()
        if generations.gathering_since is not None:
            if generations.ring_broke:
                membership.hurry()
            self._job.expire(now)
        live = frozenset(self._job.members)
        if generations.is_stranded(live):
            if self._job.finish is not None:
                raise ConfigError("this worker cannot enter the ring: the other workers have finished")
            self._job.fail(JobFailed("no worker with the state of the job is left. Restart the job"))
        if self._job.failure is not None or not generations.begin(live, now):
            return
        self._log(generations.current, generations.pause)
        for arrival in generations.current.arrivals:
            if arrival.newcomer:
                membership.activate(arrival.member.sender)
        await self._views.publish(membership)
        await self._notifier.announce()

    def _log(self, generation: Generation, pause: float) -> None:
        new = [arrival.member for arrival in generation.arrivals if arrival.newcomer]
        parts = [f"lost {', '.join(map(str, generation.lost))}" if generation.lost else ""]
        parts.append(f"{', '.join(map(str, new))} entered" if new and generation.number > 1 else "")
        why = "; ".join(filter(None, parts))
        log.info(
            "ring generation %d begins with %d worker(s) (ranks %s of the job) at step %d after %.2f s%s",
            generation.number,
            len(generation.members),
            ", ".join(str(member.rank) for member in generation.members),
            self._job.step,
            pause,
            f": {why}" if why else "",
        )

    @staticmethod
    def _has_entered(generations: Generations, member: Member, generation: int) -> bool:
        return generations.current.number > generation and member in generations.current.members
