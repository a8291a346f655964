"""One job, from the first join to the last leave.

Law: a worker takes part from the moment it was admitted until it leaves or its
lease runs out; all workers of a job run the same script on the same topology.
The job has failed once it cannot go on; it is over when nobody takes part any
more. No I/O: requests and the time come in as arguments.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from hubring.ps.core.errors import ConfigError, HubringError, JobFailed, NonFinite
from hubring.ps.core.types import Member, Sender
from hubring.ps.job.membership import Membership
from hubring.ps.job.step_rate import StepRate

log = logging.getLogger(__name__)

HELD_UP = 2.0
"""Seconds of waiting from which on a worker is taken for held up by another, rather than slow itself."""


class Reason(enum.IntEnum):
    """Why a worker left; numbers as in control.proto."""

    FINISHED = 0
    PREEMPTED = 1
    FAILED = 2
    DIVERGED = 3
    """It met what is not finite: the others cannot go on either."""


@dataclass(frozen=True, slots=True)
class Joiner:
    """A worker that asks for a place; rank and world_size None where it does not mind."""

    token: str
    job: str
    topology: str
    host: str
    pid: int
    rank: int | None = None
    world_size: int | None = None
    brings_shard: bool = False
    """The shard that it was asked to serve is on its way."""


@dataclass(slots=True)
class Progress:
    """What a worker last told of itself."""

    step: int = 0
    loss: float = float("nan")
    heard: float = 0.0
    waiting: float = 0.0
    """Seconds for which it had been held up by then."""
    step_rate: StepRate = field(default_factory=StepRate)


@dataclass(slots=True)
class Outcome:
    """How it went, for the server's last line."""

    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    broke: bool = False
    """The job could not go on, though some may have finished before."""
    departures: Counter[str] = field(default_factory=Counter)
    """How often workers left, by the names above: a place that was lost twice counts twice."""

    def leave(self, way: str, rank: int, text: str = "") -> None:
        """Takes down that a worker left, by one of the names above; `text` says why it failed or was lost."""
        self.departures[way] += 1
        known = getattr(self, way)
        if isinstance(known, dict):
            known[rank] = text
        else:
            known.append(rank)

    @property
    def ok(self) -> bool:
        return bool(self.finished) and not self.broke

    @property
    def was_preempted(self) -> bool:
        """Whether it stopped because it was asked to, and for no other reason."""
        return bool(self.preempted) and not (self.finished or self.failed or self.broke)


class Job:
    """The state of one job.

    Args:
        workers: World size; None takes the first worker's word, else 1.
        lease_seconds: How long a worker may be silent.
        keep_going: Whether the others go on without a worker that is lost; the ring never can.
        colocate: Each worker of a hub brings a shard: then they cannot either.
    """

    def __init__(
        self,
        *,
        workers: int | None,
        lease_seconds: float,
        keep_going: bool,
        colocate: bool = False,
        first_incarnation: int = 1,
    ) -> None:
        self.name = ""
        self.topology = ""
        self.outcome = Outcome()
        self.draining = False
        """All are asked to leave: nobody needs to be told of those who do."""
        self.failure: HubringError | None = None
        self.progress: dict[int, Progress] = {}
        self._workers = workers
        self._lease = lease_seconds
        self._keep_going = keep_going
        self._colocate = colocate
        self._first_incarnation = first_incarnation
        self._news: defaultdict[int, list[str]] = defaultdict(list)
        self.membership: Membership | None = None
        self.stop_after = 0
        """Of a ring: the step after which all stop; 0: none was proposed."""
        self._heard_stop: set[int] = set()

    def admit(self, joiner: Joiner, now: float) -> Member:
        """Gives a place, the same one to the same token.

        Raises:
            ConfigError: It is another job, another topology, another world size, or no place is free.
            JobFailed: The job has failed and waits for its last workers to leave.
        """
        if self.failure is not None:
            raise JobFailed(f"the job has failed and is ending: {self.failure}")
        self._check(joiner)
        if self.membership is None:
            world_size = self._workers or joiner.world_size or 1
            self.membership = Membership(world_size, self._lease, first_incarnation=self._first_incarnation)
            self.name, self.topology = joiner.job, joiner.topology
        known, step = self.membership.holds(joiner.token), self.step
        member = self.membership.join(joiner.token, joiner.rank, joiner.host, joiner.pid, now)
        if not known:
            log.info("%s joined", member)
            # Who comes late goes on where the others are, not where an earlier holder of its place was.
            self.progress[member.rank] = Progress(step if self.membership.complete else 0)
        self.progress[member.rank].heard = now
        return member

    def _check(self, joiner: Joiner) -> None:
        expected = self._workers or (self.membership.world_size if self.membership else None)
        if joiner.world_size and expected and joiner.world_size != expected:
            raise ConfigError(
                f"the worker's launcher says {joiner.world_size} workers, the server expects {expected}:"
                f" start the server with --workers {joiner.world_size}, or as many workers as it expects"
            )
        if self.membership is None:
            return
        if joiner.job != self.name:
            raise ConfigError(
                f"this server runs the job {self.name!r}, this worker wants {joiner.job!r}:"
                " wait until it is done, or start another server"
            )
        closed = self.topology == "ring" or self.colocated
        if closed and self.started and not self.membership.holds(joiner.token):
            begun = "the ring" if self.topology == "ring" else "the job, whose shards are its workers',"
            raise ConfigError(
                f"{begun} has begun and takes nobody in any more:"
                " wait until its job is done, or start another server"
            )
        if joiner.topology != self.topology:
            raise ConfigError(
                f"the other workers use --topology {self.topology}, this one {joiner.topology}:"
                " give all of them the same"
            )

    @property
    def colocated(self) -> bool:
        """Whether this job's shards are its workers'."""
        return self._colocate and self.topology == "hub"

    @property
    def world_size(self) -> int:
        """How many workers it has; 0 until the first one comes."""
        return self.membership.world_size if self.membership else 0

    @property
    def members(self) -> tuple[Member, ...]:
        """Who takes part, in rank order."""
        return self.membership.members if self.membership else ()

    @property
    def started(self) -> bool:
        return self.membership is not None and self.membership.complete

    @property
    def over(self) -> bool:
        """Whether the job began and nobody takes part any more."""
        return self.membership is not None and not self.membership.members

    def waiting_for(self) -> str:
        """Who is missing at the start, as a sentence."""
        if self.membership is None:
            return "waiting for the first worker"
        missing = sorted(self.membership.missing())
        count = len(missing)
        return (
            f"waiting for {count} of {self.membership.world_size} workers"
            f" (rank{'s' if count > 1 else ''} {', '.join(map(str, missing))} not started yet)"
        )

    def beat(self, sender: Sender, step: int, loss: float, now: float, waiting: float = 0.0) -> list[str]:
        """Renews a lease; returns the news that this worker has not heard.

        Raises:
            Fenced: This incarnation has lost its place.
        """
        assert self.membership is not None
        self.membership.beat(sender, now)
        progress = self.progress[sender.rank]
        progress.step = max(progress.step, step)  # a worker tells 0 until it has its plan
        progress.loss, progress.heard, progress.waiting = loss, now, waiting
        progress.step_rate.note(progress.step, now)
        return self._news.pop(sender.rank, [])

    def stop(self, sender: Sender, after: int) -> bool:
        """Takes down after which step a ring's member stops; returns whether all know of it.

        The first one to propose decides. It has not begun the step before that, and without it nobody
        completes that one: so whoever hears of it meanwhile can still stop there.
        """
        if after and not self.stop_after:
            log.warning("rank %d was asked to stop: all stop after step %d", sender.rank, after)
            self.stop_after, self.draining = after, True
        if after and after == self.stop_after:
            self._heard_stop.add(sender.rank)
        return bool(self.stop_after) and all(one.rank in self._heard_stop for one in self.members)

    def expire(self, now: float) -> list[Member]:
        """Drops the workers whose lease ran out, and tells the others."""
        if self.membership is None:
            return []
        lost = self.membership.expire(now)
        for member in lost:
            silent = now - self.progress[member.rank].heard
            self._gone(member, f"sent no heartbeat for {silent:.1f} s: it was killed, stopped or cut off")
            self.outcome.leave("lost", member.rank, f"silent for {silent:.1f} s at step {self._step(member)}")
        return lost

    def excuse(self, seconds: float, now: float) -> None:
        """Lets leases stand still for the `seconds` before `now`, when nobody could have heard a beat."""
        if self.membership is not None:
            self.membership.excuse(seconds, now)

    def leave(self, sender: Sender, reason: Reason, text: str, step: int) -> list[str]:
        """Takes a worker out at its own wish, after `step` completed steps; returns its last news."""
        assert self.membership is not None
        member = self.membership.leave(sender)
        if member is None:
            return []
        self.progress[member.rank].step = step
        if reason is Reason.FINISHED:
            self.outcome.leave("finished", member.rank)
            log.info("%s finished after step %d", member, step)
        elif reason is Reason.PREEMPTED:
            self.outcome.leave("preempted", member.rank)
            if not self.draining and self.membership.members:
                self._gone(member, "was asked to stop")
            else:
                log.info("%s stopped after step %d, as asked", member, step)
        elif reason is Reason.DIVERGED:
            self.outcome.leave("failed", member.rank, text)
            self.fail(NonFinite(text))
        else:
            self.outcome.leave("failed", member.rank, text)
            self._gone(member, f"failed: {text}")
        return self._news.pop(member.rank, [])

    def fail(self, error: HubringError) -> None:
        """Ends the job for everyone; the first cause counts."""
        if self.failure is None:
            log.error("the job cannot go on: %s", error)
            self.failure = error
            self.outcome.broke = True

    @property
    def step(self) -> int:
        """Steps that all who still take part have completed; once all left, the most that anybody had."""
        if self.membership is not None and self.membership.members:
            return min(map(self._step, self.membership.members))
        return max((progress.step for progress in self.progress.values()), default=0)

    def slowest(self) -> str:
        """For whom the others wait, as a clause; empty where there is nobody else, or all wait.

        In lockstep all have completed the same steps: the slow one is the one that does not wait.
        """
        busy = [member for member in self.members if self.progress[member.rank].waiting < HELD_UP]
        if len(self.members) < 2 or not busy:
            return ""
        member = min(busy, key=self._step)
        return f"{member} at step {self._step(member)}"

    def _gone(self, member: Member, why: str) -> None:
        assert self.membership is not None
        left = len(self.membership.members)
        if not self.started or self.failure is not None:
            log.warning("%s %s", member, why)
            return
        if self._keep_going and self.topology == "hub" and not self.colocated:
            line = (
                f"{member} {why}; going on with {left} of {self.membership.world_size} workers:"
                f" started again with --rank {member.rank} it takes part again"
            )
            log.warning("%s", line)
            for other in self.membership.members:
                self._news[other.rank].append(line)
        elif left:
            self.fail(JobFailed(f"{member} {why}; {self._mend()}"))

    def _mend(self) -> str:
        if self.topology == "ring":
            return "a ring cannot go on without it: start the job again"
        if self.colocated:
            return "nobody goes on without its shard: start the job again from its checkpoint"
        return "--on-loss wait does not go on without it: start the job again from its checkpoint"

    def _step(self, member: Member) -> int:
        return self.progress[member.rank].step
