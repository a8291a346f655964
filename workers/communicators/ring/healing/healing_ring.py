"""The communicator of a ring that goes on without lost members, and lets newcomers in.

A generation of the ring is an `AllreduceCommunicator` of its members. When one is lost, the exchanges of the
others fail. A thread of each member then cuts all connections, so that no member waits any longer, and meets
the others at the server, which names the members of the next generation. Members that lack a result get it
from one that has it. What no member has completed is done again, with the gradients and tensors that the
members still have. Callers only wait longer.

A member that knows of newcomers sets a flag after the gradients, so all members read it in the same step.
After that step they open a generation with the newcomers, which get the state of the first member.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import DeadlineExceeded, HubringError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.types import HyperTable, StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import ChangingMembers, CollectiveWork, Communicator, ParameterState
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator, check_same_model
from hubring.workers.communicators.ring.healing.calls import Calls
from hubring.workers.communicators.ring.healing.generations import (
    Agreed,
    ExchangeLog,
    ExchangeWork,
    LoggedExchange,
    Note,
    RingMeeting,
    SentBucket,
    catch_up,
    deal_samples,
)
from hubring.workers.communicators.ring.healing.samples import Samples
from hubring.workers.communicators.ring.results import CallResults

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long a member that leaves waits for its healing thread."""

MOST_ATTEMPTS = 20
"""How often a ring may break in a row without a complete exchange."""


class HealingRing(Communicator, ChangingMembers):
    """Exchanges with the members of the current generation.

    `rank` and `size` are those of the current members. They change only between two steps.

    Args:
        meeting: Where the members meet.
        late: Whether this worker is a newcomer. It must call `enter`.
        size: Members before the newcomer enters.
        timeout: Seconds that one exchange may take.

    Attributes:
        generation: The number of the current generation, from 1.
        pauses: Seconds without a ring before each generation after the first.

    Raises:
        HubringError: The members could not meet.
    """

    topology = "ring"
    steps_on = "worker"
    sums_presence = True
    joins = True
    tunable = False

    def __init__(
        self, meeting: RingMeeting, *, late: bool = False, size: int = 0, timeout: float = 300.0
    ) -> None:
        self.timeout: float = timeout
        self.traffic = Traffic()
        self.members = self
        self.late = late
        self.awaits_state = int(late)
        self.rank, self.size = size, size + 1
        self.generation = 0
        self.pauses: list[float] = []
        self._meeting = meeting
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._log, self._results = ExchangeLog(), CallResults()
        self._calls = Calls(self, self._broke, lock)
        self._samples: list[Samples] = []
        self._missed: list[Agreed] = []
        """The generations since another member has a sampler that this one makes later."""
        self._known: tuple[int, ...] = ()
        """The members that the script knows, by rank: their ranks in the job."""
        self._members: tuple[int, ...] = ()
        """The members of the current generation."""
        self._changes_at = 0
        """The step after which the script learns of the members."""
        self._admits_at = 0
        """The step after which newcomers enter; 0: none wait."""
        self._ring: AllreduceCommunicator | None = None
        self._breaks = False
        self._broken_at = 0.0
        self._attempts = 0
        self._at_boundary = False
        self._agreed_at_boundary: Agreed | None = None
        """All members of it learn its members, even if some could not connect and are in a later one."""
        self._newcomers_entered = False
        self._error: HubringError | None = None
        self._thread = threading.Thread(target=self._keep_healed, name="ring healer", daemon=True)
        if not late:
            while True:
                with suppress(RingBroken):  # a member was lost meanwhile: the others meet again
                    self._regroup(boundary=True)
                    break
            self._learn(self._members)
        self._thread.start()

    # Exchanges.

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        if self.awaits_state:
            return 0
        check_same_model([bucket.spec for bucket in buckets], self._meeting.compress, self._gather)
        self.broadcast_parameters(buckets)
        return 0

    def _gather(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns every member's flat uint8 tensor, in rank order."""
        length = torch.tensor([own.numel()], device="cpu")
        lengths = self.collective(Call(Collective.ALLGATHER, "ring.lengths"), length).get()
        whole = self.collective(Call(Collective.ALLGATHER, "ring.bytes"), own).get()
        return torch.split(whole, lengths.tolist())

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        assert not isinstance(hyper, HyperTable), "no hub steps"
        with self._changed:
            exchange, sent = self._log.send(bucket, int(hyper["step"]), newcomers=self.newcomers_wait)
            if self._ring is not None:
                self._start(self._ring, exchange, sent)
        return ExchangeWork(f"the exchange of bucket {bucket.spec.index}", exchange, self.settle)

    def settle(self, exchange: LoggedExchange, timeout: float | None) -> None:
        """Waits until an exchange is complete, and puts its means in place. Raises as `Work.wait`."""
        limit = self.timeout if timeout is None else timeout
        with self._changed:
            exchange.closed = True
            self._changed.wait_for(lambda: exchange.complete or self._error is not None, limit)
            if exchange is not self._log.in_flight:
                return  # another bucket of it was waited for before
            if not exchange.complete:
                raise self._error or DeadlineExceeded(
                    f"an exchange around the ring took longer than {limit:g} s; raise --timeout if a worker"
                    " may take this long"
                )
            self._log.complete()
            self._attempts = 0
            if exchange.knows_newcomers:
                self._admits_at = exchange.step + 1
        for samples in self._samples:
            samples.exchanged(exchange.step)

    def _start(self, ring: AllreduceCommunicator, exchange: LoggedExchange, sent: SentBucket) -> None:
        """Sends one bucket around the ring."""

        def ended(work: Work) -> None:
            if work.error is not None:
                self._broke(ring)
                return
            with self._changed:
                if self._ring is ring:
                    sent.arrived = True
                    self._changed.notify_all()

        ring.average(f"the exchange of bucket {sent.bucket.spec.index}", sent.ready()).when_done(ended)

    # Collectives.

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        self._calls.add(call, tensors, work, self._known)

    def open_group(self, ranks: tuple[int, ...]) -> None:
        self._calls.open_group(ranks)

    def close_group(self, ranks: tuple[int, ...]) -> None:
        self._calls.close_group(ranks)

    # Changes of the members.

    def deal(self, length: int, order: Callable[[int], torch.Tensor]) -> Samples:
        samples = Samples(length, order)
        with self._changed:
            samples.rank, samples.size = self.rank, self.size
            for agreed in self._missed:
                deal_samples(len(self._samples), samples, agreed, self._meeting.identity)
            self._samples.append(samples)
        return samples

    def hear(self, broken: int, *, newcomers: bool) -> None:
        """Takes a report of the server, in any thread.

        Args:
            broken: The generation that must end, since a member is lost; 0 for none.
            newcomers: Whether workers wait to enter.
        """
        with self._changed:
            self.newcomers_wait = newcomers
            if broken == self.generation and self._ring is not None:
                self._broke(self._ring)

    def between_steps(self, step: int) -> bool:
        if self._known != self._members and step >= self._changes_at:
            self._learn(self._members)
        if not self._admits_at or step < self._admits_at:
            return False
        self._admits_at = 0
        self.let_in()
        return self._newcomers_entered

    def let_in(self) -> None:
        while True:
            self.collective(Call(Collective.BARRIER, "ring.boundary")).get()  # all members are here
            if self._open_at_boundary():
                break

    def enter(self) -> None:
        """Enters the ring as a newcomer, after the members' next step.

        Raises:
            HubringError: The job has failed.
        """
        self._open_at_boundary()
        self.late = False

    def _open_at_boundary(self) -> bool:
        """Opens a generation between two steps; returns False if a member had not completed its step."""
        with self._changed:
            before, self._newcomers_entered = self.generation, False
            self._at_boundary = self._breaks = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._at_boundary or self._error is not None)
            if self._error is not None:
                raise self._error
            agreed = self._agreed_at_boundary
            if agreed is None or agreed.number <= before:
                return False
            self._learn(agreed.members)
            return True

    def _learn(self, members: tuple[int, ...]) -> None:
        with self._changed:
            self._known = members
            self.rank, self.size = self._known.index(self._meeting.identity), len(self._known)

    def _broke(self, ring: AllreduceCommunicator) -> None:
        with self._changed:
            if self._ring is ring and not self._breaks:
                self._breaks, self._broken_at = True, time.monotonic()
                self._changed.notify_all()

    def _keep_healed(self) -> None:
        torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._breaks or self._error is not None)
                if self._error is not None:
                    return
                boundary = self._at_boundary
            try:
                self._regroup(boundary=boundary)
            except RingBroken as error:
                log.debug("the next generation broke: %s", error)
            except HubringError as error:
                self.fail(error)
            except Exception as error:  # any error: callers wait for this thread
                self.fail(RingBroken(f"rank {self.rank} cannot open a ring: {error!r}; restart the job"))

    def _regroup(self, *, boundary: bool) -> None:
        """Ends the current generation and opens the next one.

        Raises:
            RingBroken: A member was lost meanwhile.
            HubringError: The job has failed.
        """
        agreed = self._meeting.agree(self.generation, self._pause(boundary=boundary), boundary=boundary)
        self._accept(agreed)
        ring = self._meeting.connect(agreed, self._results)
        try:
            catch_up(agreed, ring, self._log, self._results, self._calls.take_over)
        except BaseException:
            ring.abort(RingBroken("a member of the ring is lost"))
            raise
        self._go_on(agreed, ring)

    def _pause(self, *, boundary: bool) -> Note:
        """Ends the current generation; returns what the other members must know."""
        with self._changed:
            ring, self._ring, self._breaks = self._ring, None, True
            self._calls.pause()
            self._attempts += 1
            if self._attempts > MOST_ATTEMPTS:
                raise DeadlineExceeded(
                    f"the ring broke {MOST_ATTEMPTS} times without a complete exchange; check the network"
                    " between the workers, and restart the job"
                )
        if ring is not None:
            ring.abort(RingBroken("a member of the ring is lost"))
        with self._changed:
            self._log.begin_again(newcomers=self.newcomers_wait)
            step = self._log.step
            positions = tuple(samples.freeze(step) for samples in self._samples)
            histories = tuple(samples.history for samples in self._samples if boundary)
            rank = self._members.index(self._meeting.identity) if self._members else 0
            done = self._log.latest.number, step, self._results.count
            return Note(rank, *done, positions, histories, self._calls.sends)

    def _accept(self, agreed: Agreed) -> None:
        """Accepts the next generation, which is certain now, whether or not the members can connect."""
        enters = agreed.members.index(self._meeting.identity) >= len(agreed.old_notes)
        self._calls.settle(agreed, self._members)
        with self._changed:
            self.generation, self._members = agreed.number, agreed.members
            self._changes_at = agreed.step + 1
            self.newcomers_wait = self.newcomers_wait and not agreed.boundary
            if agreed.boundary:
                self._agreed_at_boundary = agreed
                self._newcomers_entered |= len(agreed.members) > len(agreed.stays)
            if enters:
                self._log.follow(max(note.exchanges for note in agreed.old_notes), agreed.step)
                self._results.count = max(note.collectives for note in agreed.old_notes)
            ahead = any(len(note.positions) > len(self._samples) for note in agreed.old_notes)
            self._missed = [*self._missed, agreed] if ahead else []
            for place, samples in enumerate(self._samples):
                deal_samples(place, samples, agreed, self._meeting.identity)

    def _go_on(self, agreed: Agreed, ring: AllreduceCommunicator) -> None:
        """Continues in an open generation."""
        with self._changed:
            ring.traffic = self.traffic
            self._ring, self._breaks, self.backend = ring, False, ring.backend
            self._at_boundary = False
            exchange = self._log.in_flight
            if exchange is not None and not exchange.complete:
                for sent in exchange.sent:
                    self._start(ring, exchange, sent)
            self._calls.go_on(ring, agreed.members)
            self._changed.notify_all()
        for samples in self._samples:
            samples.thaw()
        if agreed.number > 1:
            self._tell(agreed)

    def _tell(self, agreed: Agreed) -> None:
        pause = time.monotonic() - self._broken_at if self._broken_at else 0.0
        self._broken_at = 0.0
        self.pauses.append(pause)
        ranks = ", ".join(map(str, agreed.members))
        text = "ring generation %d: %d worker(s), ranks %s of the job, after step %d and a pause of %.2f s"
        log.warning(text, agreed.number, len(agreed.members), ranks, agreed.step, pause)

    def report(self) -> dict[str, Any]:
        pauses = [round(pause, 3) for pause in self.pauses]
        return {"ring": {"generation": self.generation, "pauses": pauses}}

    # The end.

    def fail(self, error: HubringError) -> None:
        """Fails everything. The session calls it, from any thread, when this worker cannot continue."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._calls.fail(error)
        for samples in self._samples:
            samples.thaw()

    def close(self, *, finished: bool) -> None:
        self.fail(left := RingBroken(f"rank {self.rank} has left the ring"))
        self._thread.join(CLOSE_SECONDS)
        with self._changed:
            ring, self._ring = self._ring, None
        if ring is not None and finished:
            ring.close(finished=True)
        elif ring is not None:
            ring.abort(left)
