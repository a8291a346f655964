"""One job, from the first join to the last leave.

Law: a worker is a member from its admission until it leaves or its lease expires. All workers of a job run
the same script on the same topology. A job starts once it has all workers. It waits for all of them again if
one is lost before they have exchanged anything. A job that cannot continue has failed. A job is over when it
has no members left. No I/O: requests and the time are arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from hubring.ps.core.errors import RESTART_JOB, ConfigError, HubringError, JobFailed, NonFinite
from hubring.ps.core.types import Member, Sender
from hubring.ps.job.generations import Generations
from hubring.ps.job.membership import RETURN_SECONDS, Joiner, Membership, Place
from hubring.ps.job.outcome import FirstFinish, JobOutcome, LeaveReason
from hubring.ps.job.telemetry import HELD_UP, Completion, Progress, Standstill, Telemetry

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class JobState:
    """What another process needs to know of a job, besides its members."""

    first_incarnation: int = 1
    name: str = ""
    topology: str = ""
    local: bool = False
    averages: bool = False
    """Whether the hub only averages. Then no worker can join after the start."""
    exchanged: bool = False
    """Whether a lost worker may have exchanged something with the others, which a new worker would lack."""
    outcome: JobOutcome = field(default_factory=JobOutcome)
    draining: bool = False
    """Whether all workers were asked to leave. Departures are then no news for the others."""
    stop_after: int = 0
    """The step after which a ring stops; 0 if no member proposed one."""
    heard_stop: set[int] = field(default_factory=set)
    """The ranks that know this step."""
    finish: FirstFinish | None = None
    """The first worker that finished, in lockstep."""
    warned: bool = False
    """Whether the others know that they step without it."""
    spared: int = 0
    """How many of its shards ended with workers that had finished."""
    news: dict[int, list[str]] = field(default_factory=dict)
    """What each rank learns with its next heartbeat."""


class Job(JobState):
    """One job.

    Args:
        workers: World size; None uses the first worker's `world_size`, or 1.
        lease_seconds: How long a worker may send no heartbeat.
        keep_going: Whether a hub's job continues without a lost worker. A ring does with `--min-workers`.
        colocate: Whether each worker of a hub starts a shard. Such a job never continues either.
        lockstep: Whether all workers of a hub do the same step at the same time. Those of a ring always do.
        first_incarnation: The incarnation of the first join.
    """

    def __init__(
        self,
        *,
        workers: int | None,
        lease_seconds: float,
        keep_going: bool,
        colocate: bool = False,
        lockstep: bool = True,
        first_incarnation: int = 1,
    ) -> None:
        super().__init__(first_incarnation)
        self.failure: HubringError | None = None
        self.published = 0
        """Epoch of the view that all shards use; 0 before the first."""
        self.progress: dict[int, Progress] = {}
        self.completion = Completion()
        self._workers, self._lease = workers, lease_seconds
        self.keeps_going, self._colocate, self._lockstep = keep_going, colocate, lockstep
        self.membership: Membership | None = None
        self.generations = Generations()
        self._standstill = Standstill(self.tell, self.fail)

    def admit(self, joiner: Joiner, now: float, *, waits: bool = False) -> Member:
        """Gives the worker a rank. The same token always gets the same rank.

        Args:
            joiner: The worker.
            now: Monotonic seconds.
            waits: Whether the worker waits for its place, and sends no heartbeats yet.

        Raises:
            ConfigError: The job, topology, world size or `--local` differs, or no rank is free.
            JobFailed: The job has failed, and its last workers have not left yet.
        """
        if self.failure is not None:
            raise JobFailed(f"the job has failed and is ending: {self.failure}")
        self._check(joiner)
        if self.membership is None:
            world_size = self._workers or joiner.world_size or 1
            self.membership = Membership(world_size, self._lease, self.first_incarnation)
            self.name, self.topology, self.local = joiner.job, joiner.topology, joiner.local
            self.generations = Generations(joiner.min_workers)
        known, step = self.membership.holds(joiner.token), self.step
        member = self.membership.join(joiner.token, joiner.rank, joiner.host, joiner.pid, now, waits=waits)
        if not known:
            log.info("%s joined", member)
            # A late worker continues at the step of the others, not of an earlier worker with its rank.
            self.progress[member.rank] = Progress(step if self.membership.complete else 0)
        self.progress[member.rank].heard = now
        return member

    def _check(self, joiner: Joiner) -> None:
        expected = self._workers or (self.membership.world_size if self.membership else None)
        if joiner.world_size and expected and joiner.world_size != expected:
            raise ConfigError(
                f"this worker's launcher starts {joiner.world_size} workers, but the server expects"
                f" {expected}; restart the server with --workers {joiner.world_size}, or start {expected}"
                " workers"
            )
        if self.membership is None:
            return
        if joiner.job != self.name:
            raise ConfigError(
                f"this server runs job {self.name!r}, but this worker belongs to job {joiner.job!r};"
                " wait until the server's job finishes, or start another server"
            )
        closed = (self.topology == "ring" and not self.generations.heals) or self.colocated
        if closed and self.started and not self.membership.holds(joiner.token):
            kind = "a ring" if self.topology == "ring" else "a job with --colocate"
            raise ConfigError(
                f"the job has started; no worker can join {kind} after its start."
                " Wait until the job finishes, or start another server"
            )
        if (joiner.topology, joiner.local) != (self.topology, self.local):
            given = [f"--topology {one.topology}{' --local' * one.local}" for one in (joiner, self)]
            text = "this worker uses {}, but the job uses {}; start all workers with the same flags"
            raise ConfigError(text.format(*given))
        self.generations.check(joiner.min_workers)

    def ends_before(self, joiner: Joiner) -> bool:
        """Whether this worker belongs to the next job, because this one is about to end."""
        if self.membership is None or self.membership.holds(joiner.token):
            return False
        gone = self.membership.disconnected
        if self.failure is not None or self.draining or len(gone) == len(self.members):
            return True
        try:
            self._check(joiner)
            self.membership.free_rank(joiner.rank)
        except ConfigError:
            return bool(gone)  # if they do not return, the worker has a place in this job or in the next one
        return False

    def ending(self) -> str:
        """Returns what a worker of the next job waits for, in words."""
        assert self.membership is not None
        state = "has failed" if self.failure else "is stopping" if self.draining else "is ending"
        gone = ", ".join(map(str, self.membership.disconnected))
        left = ", ".join(str(each) for each in self.members if each not in self.membership.disconnected)
        lost = f"the connection of {gone} closed, and it has {RETURN_SECONDS:g} s to return" if gone else ""
        leaves = f"{left} must leave first" if left and (self.failure or self.draining) else ""
        reasons = "; ".join(filter(None, (lost, leaves)))
        return f"waiting for job {self.name!r}, which {state}{f': {reasons}' if reasons else ''}"

    @property
    def colocated(self) -> bool:
        """Whether this job's workers run its shards."""
        return self._colocate and self.topology == "hub"

    @property
    def world_size(self) -> int:
        """How many workers the job has; 0 until the first worker joins."""
        return self.membership.world_size if self.membership else 0

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, in rank order."""
        return self.membership.members if self.membership else ()

    @property
    def started(self) -> bool:
        return self.membership is not None and self.membership.complete

    @property
    def over(self) -> bool:
        """Whether a worker has joined and no member is left."""
        return self.membership is not None and not self.membership.members

    def waiting_for(self) -> str:
        """Returns which workers are missing at the start, in words."""
        return f"waiting for {self.membership.absent() if self.membership else 'the first worker'}"

    def beat(
        self,
        sender: Sender,
        step: int,
        loss: float,
        now: float,
        waiting: float = 0.0,
        telemetry: Telemetry | None = None,
    ) -> list[str]:
        """Renews a lease; returns the news that this worker has not received yet.

        Args:
            sender: The worker.
            step: Its completed steps.
            loss: Its last loss.
            now: Monotonic seconds.
            waiting: Seconds that it has been blocked.
            telemetry: Its metrics and usage; None leaves them as they are.

        Raises:
            Fenced: This incarnation is no longer a member.
        """
        assert self.membership is not None
        self.membership.beat(sender, now)
        progress = self.progress[sender.rank]
        progress.step = max(progress.step, step)  # a worker reports 0 until it has its plan
        progress.loss, progress.heard, progress.waiting = loss, now, waiting
        progress.step_rate.note(progress.step, now)
        self._warn_of_uneven(sender.rank, progress.step)
        if telemetry is not None:
            progress.telemetry = telemetry
            progress.sample_rate.note(telemetry.samples, now)
            self.completion.note(self._part_done(), now)
            if self.started and self.failure is None and not self.draining:
                self._standstill.look({one.rank: self.progress[one.rank] for one in self.members}, now)
        return self.news.pop(sender.rank, [])

    def stop(self, sender: Sender, after: int) -> bool:
        """Records the step after which a member of a ring stops; returns whether all members know the step.

        The first proposal counts. Its member has not begun that step, and no other member can complete
        the step without it. So every member can still stop there.
        """
        if after and not self.stop_after:
            log.warning("rank %d received a stop request; all workers stop after step %d", sender.rank, after)
            self.stop_after, self.draining = after, True
        if after and after == self.stop_after:
            self.heard_stop.add(sender.rank)
        return bool(self.stop_after) and all(one.rank in self.heard_stop for one in self.members)

    def expire(self, now: float) -> list[Member]:
        """Removes the workers whose lease expired, and notifies the others."""
        if self.membership is None:
            return []
        for member in (lost := self.membership.expire(now)):
            silent = now - self.progress[member.rank].heard
            why = f"sent no heartbeat for {silent:.1f} s (it was killed, suspended or disconnected)"
            fixed = self.exchanged or self.draining or self.generations.heals
            if self.membership.active and self.failure is None and not fixed:
                self.membership.complete = False
                why += f"; {self.waiting_for()}. To replace the worker, start one with --rank {member.rank}"
                self.tell(f"{member} {why}")
            self._lose(member, why)
            self.outcome.leave("lost", member.rank, f"silent for {silent:.1f} s at step {self._step(member)}")
            self.news.pop(member.rank, None)
        return lost

    def resume(self, world_size: int, places: Iterable[Place], now: float) -> None:
        """Takes over these members of another process. All leases begin `now`."""
        self.membership = Membership(world_size, self._lease)
        self.membership.resume(places, now)

    def extend_leases(self, seconds: float, now: float) -> None:
        """Extends all leases by `seconds`: the server could not receive a heartbeat in that time."""
        if self.membership is not None:
            self.membership.extend_leases(seconds, now)

    def leave(self, sender: Sender, reason: LeaveReason, text: str, step: int) -> list[str]:
        """Removes a worker that leaves after `step` completed steps; returns its last news.

        Raises:
            Fenced: The worker lost its place before. Leaving twice changes nothing.
        """
        assert self.membership is not None
        member = self.membership.leave(sender)
        if member is None:
            return []
        self.progress[member.rank].step = step
        self._warn_of_uneven(member.rank, step)
        if reason is LeaveReason.FINISHED:
            self.outcome.leave("finished", member.rank)
            self.generations.leave(member)
            log.info("%s finished after step %d", member, step)
            if self.finish is None and (self._lockstep or self.topology == "ring"):
                self.finish = FirstFinish(member, step)
                self.membership.finished = self.finish.ends_rest
        elif reason is LeaveReason.PREEMPTED:
            self.outcome.leave("preempted", member.rank)
            if not self.draining and self.membership.members:
                self._lose(member, "stopped on request")
            else:
                log.info("%s stopped on request after step %d", member, step)
        elif reason is LeaveReason.DIVERGED or (reason is LeaveReason.REFUSED and self._lockstep):
            self.outcome.leave("failed", member.rank, text)
            refused = ConfigError(f"{member} failed: {text}")
            self.fail(refused if reason is LeaveReason.REFUSED else NonFinite(text))
        else:
            self.outcome.leave("failed", member.rank, text)
            self.outcome.erred |= self.failure is None
            self._lose(member, f"failed: {text}")
        return self.news.pop(member.rank, [])

    def fail(self, error: HubringError) -> None:
        """Fails the job for all workers. The first cause counts."""
        if self.failure is None:
            log.error("the job failed: %s", error)
            self.failure = error
            self.outcome.broke = True

    @property
    def step(self) -> int:
        """Steps that all members have completed; with no members left, the most that any worker completed."""
        if self.membership is not None and self.membership.members:
            return min(map(self._step, self.membership.members))
        return max((progress.step for progress in self.progress.values()), default=0)

    def _part_done(self) -> float | None:
        """Returns the least part of the job that any member reports as done."""
        parts = (self.progress[member.rank].telemetry.progress for member in self.members)
        return min((part for part in parts if part is not None), default=None)

    @property
    def replaceable(self) -> list[int]:
        """The ranks without a worker that a new worker can take while the job continues."""
        if not self.started or not self.members or self.failure or self.draining:
            return []
        if self.averages or not self._survives_loss:
            return []
        taken = {*(member.rank for member in self.members), *self.outcome.finished}
        return [rank for rank in range(self.world_size) if rank not in taken]

    @property
    def _survives_loss(self) -> bool:
        goes_on = self.keeps_going and self.topology == "hub" and not self.colocated
        return goes_on or (self.generations.heals and len(self.members) >= self.generations.least)

    def slowest(self) -> str:
        """Returns the worker that the others wait for, in words.

        Empty with a single member, or if all members wait. In lockstep all members have completed the same
        steps, so the slow worker is the one that does not wait, or one that is missing.
        """
        if self.membership is not None and not self.started:
            return self.membership.absent()
        busy = [member for member in self.members if self.progress[member.rank].waiting < HELD_UP]
        if len(self.members) < 2 or not busy:
            return ""
        member = min(busy, key=self._step)
        return f"{member} at step {self._step(member)}"

    def tell(self, line: str) -> None:
        """Sends news to all workers, with their next heartbeats."""
        for member in self.members:
            self.news.setdefault(member.rank, []).append(line)

    def finished(self, sender: Sender) -> str:
        """Returns the error if this worker takes another step, because another one finished; or empty."""
        late = self.finish is not None and self.progress[sender.rank].step >= self.finish.step
        return self.finish.ends_rest if self.finish is not None and late else ""

    def _warn_of_uneven(self, rank: int, step: int) -> None:
        """Warns once if this rank stepped without one that finished. Around a ring it steps no more."""
        if self.finish is None or self.warned or step <= self.finish.step or self.topology == "ring":
            return
        self.warned = True
        log.warning("%s", self.finish.warning)
        for each in {rank, *(member.rank for member in self.members)}:
            self.news.setdefault(each, []).append(self.finish.warning)

    def _lose(self, member: Member, why: str) -> None:
        left = len(self.members)
        if not self.started or self.failure is not None:
            log.warning("%s %s", member, why)
            return
        if self._survives_loss:
            fix = "" if self.averages else f". To replace the worker, start one with --rank {member.rank}"
            line = f"{member} {why}; the job continues with {left} of {self.world_size} workers{fix}"
            log.warning("%s", line)
            self.tell(line)
        elif left:
            fix = self._fix()
            if why.startswith("failed:"):  # another worker would fail alike
                fix = fix.replace("Restart", "Fix that error, then restart")
            self.fail(JobFailed(f"{member} {why}; {fix}"))

    def _fix(self) -> str:
        if self.topology == "ring":
            return self.generations.too_few(len(self.members))
        policy, lost = ("", "its shard") if self.colocated else ("with --on-loss wait ", "it")
        return f"{policy}the job cannot continue without {lost}. {RESTART_JOB}"

    def _step(self, member: Member) -> int:
        return self.progress[member.rank].step
