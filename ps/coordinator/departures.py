"""Workers that left their job, and wait until it is over.

Law: a worker that finished learns the verdict of its job. The server stops only after such workers have
confirmed it, or after it has waited for them: an answer can be lost, and a worker then asks again. Workers of
an earlier job, or of one that ended long ago, ask no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from hubring.ps.coordinator.notifier import Notifier
from hubring.ps.core.errors import Fenced
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Sender
from hubring.ps.job.job import Job
from hubring.ps.job.verdict import EndedJobs, Verdict

log = logging.getLogger(__name__)


class Departures:
    """The departures from all jobs of a server.

    Args:
        job: Returns the current job.
        notifier: Where workers wait for the end of their job.
        clock: The source of the time.
        patience: Seconds after which a worker without an answer gives up.
    """

    def __init__(
        self, job: Callable[[], Job], notifier: Notifier, clock: TimeSource, patience: float
    ) -> None:
        self._job = job
        self._notifier = notifier
        self._clock = clock
        self._patience = patience
        self._closed_at = clock.now()
        """When the last job ended, or when this process took over."""
        self._ended = EndedJobs()
        self._waiting: set[Sender] = set()

    def expect(self, sender: Sender) -> None:
        """Notes that a worker finished, and will ask how its job ended."""
        self._waiting.add(sender)

    async def close(self, job: Job, verdict: Verdict) -> None:
        """Records how a job ended, and answers the workers that wait."""
        if job.membership is not None:
            self._ended.add(job.membership.departed, verdict)
            self._waiting = {each for each in self._waiting if each.incarnation in job.membership.departed}
        self._closed_at = self._clock.now()
        await self._notifier.announce()

    def verdict(self, sender: Sender) -> Verdict | None:
        """Returns how the job ended that this worker left; None while it runs."""
        return self._ended.find(sender)

    async def await_verdict(self, sender: Sender, seconds: float) -> Verdict | None:
        """Returns how this worker's job ended, or None if it still runs after `seconds`."""
        await self._notifier.wait_for(lambda: self.verdict(sender) is not None, seconds)
        return self.verdict(sender)

    async def heard(self, sender: Sender) -> None:
        """Notes that a worker knows how its job ended."""
        self._waiting.discard(sender)
        await self._notifier.announce()

    def awaited(self) -> str:
        """Returns what the end of the current job waits for, in words."""
        return ", ".join(map(str, self._job().members)) or "the last checkpoint"

    def check(self, sender: Sender) -> None:
        """Raises Fenced if this worker's job is over, or if this server does not know the worker."""
        absence = self._ended.absence(sender)
        if absence:
            raise Fenced(absence)
        if self._job().membership is None:
            raise Fenced(
                f"this server runs no job of rank {sender.rank}: it did not admit the worker, or has"
                " restarted since. Restart the worker to join the next job"
            )

    async def see_off(self, seconds: float) -> None:
        """Waits until the workers that finished know how their job ended, at most `seconds`."""
        await self._notifier.wait_out(lambda: not self._unanswered(), seconds)
        for sender in self._unanswered():
            log.warning("rank %d finished, but did not confirm that it knows how the job ended", sender.rank)

    def _unanswered(self) -> list[Sender]:
        if self._clock.now() - self._closed_at > self._patience:
            return []
        return [sender for sender in self._waiting if self.verdict(sender) is not None]
