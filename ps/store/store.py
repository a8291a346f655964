"""KVStore: one shard's state machine. Requests and views in, replies out.

Laws:
- Every request is answered exactly once, now or later, every retry included.
- A push counts once, whatever is retried, reordered or lost (`hubring.ps.store.push_ledger`).
- The mean over the actual contributors is applied when the policy says so
  (`hubring.ps.store.consistency`), summed in rank order, so that reruns are bitwise equal.
- Whoever pushed reads once its push is applied and the policy lets it.
- Who is not in the view waits for nothing and is waited for by nobody.
- What is not finite is refused before an optimizer or a worker has it, and the job with it.

Nothing in here waits, sends or looks at a clock, so that every schedule of
messages can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hubring.ps.core.counters import Stats
from hubring.ps.core.errors import CheckpointCorrupt, NonFinite
from hubring.ps.core.messages import (
    Code,
    Coded,
    Contribute,
    Delivery,
    Init,
    Pull,
    Push,
    Refusal,
    Request,
    Result,
    Ticket,
    Values,
)
from hubring.ps.core.types import BucketSpec, Sender, Slice, View
from hubring.ps.store import refusals
from hubring.ps.store.collective_rounds import RoundBook
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.gpu_tensor import is_placed
from hubring.ps.store.key_state import Contribution, Entry, Reader, Settled
from hubring.ps.store.key_table import KeyTable
from hubring.ps.store.live_workers import LiveWorkers
from hubring.ps.store.parameter_memory import HostMemory, ParameterMemory
from hubring.ps.store.push_ledger import Ledger, Standing
from hubring.ps.store.snapshot import Capture, Snapshot

GIVER = 0
"""The rank that brings a job's first values."""


class KVStore:
    """The keys of one shard.

    Args:
        consistency: When a gradient counts, and who may read.
        memory: Where parameters and all that belongs to them are kept; None: in this process's memory.
    """

    def __init__(self, consistency: Consistency, memory: ParameterMemory | None = None) -> None:
        self._consistency = consistency
        self._memory = memory or HostMemory()
        self._workers = LiveWorkers()
        self._entries = KeyTable()
        self._ledger = Ledger()
        self._rounds = RoundBook()
        self._stats = Stats()
        self._capture: Capture | None = None
        self._draining = False
        self._failure: Refusal | None = None
        self.unsound = ""
        """Why nothing of this may be saved any more; empty: it may."""

    # What the coordinator says.

    def assign(self, slices: Sequence[Slice], buckets: Sequence[BucketSpec]) -> None:
        """Takes this shard's slices, zeroed and without a past: what was counted before was a trial.

        Raises:
            ConfigError: A bucket is of a dtype or optimizer that the hub cannot serve.
        """
        self._entries = KeyTable.make(
            slices,
            {bucket.index: bucket for bucket in buckets},
            self._memory,
            finite=self._consistency.finite,
            shown=self._memory.shows and self._leaves_alone,
        )
        self._ledger = Ledger()
        self._stats = Stats()
        self._seat(self._workers.senders())
        if self._draining:
            self.drain()

    @property
    def _leaves_alone(self) -> bool:
        """Whether a key's values stay as they are until each of its readers has pushed again."""
        return self._consistency.lockstep and not self._consistency.backup

    def restore(self, snapshot: Snapshot) -> None:
        """Goes on from a checkpoint; it may hold keys of other shards too.

        Raises:
            CheckpointCorrupt: A key of this shard is missing or of another size.
        """
        for key, entry in self._entries.items():
            if key not in snapshot:
                raise CheckpointCorrupt(f"the checkpoint does not hold key {key}; it was made by another job")
            entry.restore(snapshot[key])
            self._ledger.restore(key, snapshot[key].clocks)
        self._seat(self._workers.senders())

    def on_view(self, view: View) -> list[Delivery]:
        """Acts on who takes part now; an older epoch than the last changes nothing."""
        turnover = self._workers.update(view)
        if turnover is None:
            return []
        deliveries = [
            Delivery(ticket, refusals.fenced(sender, view.epoch))
            for sender in turnover.left
            for entry in self._entries.values()
            for ticket in entry.forget([sender.rank])
        ]
        self._memory.retain(self._workers.senders())
        self._seat(turnover.joined)
        for entry in self._entries.values():
            deliveries += self._turn(entry) + self._release_orphans(entry)
        return deliveries + self._rounds.on_view(self._workers.live)

    def drain(self) -> None:
        """From the next update of each key on, replies say that the job ends.

        In lockstep modes that is a round, so all ranks see it in the same step.
        """
        self._draining = True
        for entry in self._entries.values():
            entry.drain_from = min(entry.drain_from, entry.version + self._consistency.lockstep)

    def fail(self, text: str, code: Code = Code.JOB_FAILED) -> list[Delivery]:
        """Refuses everything that waits, and all that comes later; the first cause counts."""
        self._failure = self._failure or Refusal(code, text)
        waiting = [ticket for entry in self._entries.values() for ticket in entry.forget(entry.waiting())]
        return [Delivery(ticket, self._failure) for ticket in waiting] + self._rounds.refuse_all(
            self._failure
        )

    # Snapshots.

    def capture_at(self, version: int | None) -> bool:
        """Begins a snapshot: every key is copied right when it reaches `version`; None: as it is.

        A key without values is copied when it gets them.

        Returns:
            False, and nothing is begun, if some key is past that version.
        """
        if version is not None and any(entry.version > version for entry in self._entries.values()):
            return False
        self._capture = Capture(version, self._entries.keys())
        for entry in self._entries.values():
            self._capture.catch(entry, self._ledger)
        return True

    def captured(self) -> Snapshot | None:
        """Hands over the snapshot, once, when every key is in it."""
        if self._capture is None or not self._capture.complete:
            return None
        snapshot, self._capture = self._capture.caught, None
        return snapshot

    def stop_capture(self) -> None:
        """Gives up the snapshot that was begun."""
        self._capture = None

    def name_unsound(self, key: int, values: Tensor) -> str:
        """Which parameter is not finite in a copy of a key's values, as a clause."""
        return refusals.unsound(self._entries[key], values)

    def stats(self) -> Stats:
        """What was counted; the versions are those of now."""
        versions = [entry.version for entry in self._entries.values()]
        self._stats.keys = len(versions)
        self._stats.oldest, self._stats.newest = min(versions, default=0), max(versions, default=0)
        return self._stats

    # What workers say.

    def handle(self, request: Request, ticket: Ticket) -> list[Delivery]:
        """Takes one request; answers it, or others that waited for it, or nobody yet."""
        refusal = self._refusal(request)
        if refusal is not None:
            return [Delivery(ticket, refusal)]
        match request:
            case Push():
                return self._on_push(self._entries[request.key], request, ticket)
            case Pull():
                return self._on_pull(self._entries[request.key], request, ticket)
            case Init():
                return self._on_init(self._entries[request.key], request, ticket)
            case Contribute():
                return self._rounds.contribute(request, ticket, self._workers.live)

    def _on_init(self, entry: Entry, init: Init, ticket: Ticket) -> list[Delivery]:
        deliveries = [Delivery(ticket, Result())]
        if not entry.initialised:
            entry.values.copy_(init.values)
            entry.initialised = True
            if self._capture is not None:
                self._capture.catch(entry, self._ledger)
            for puller in entry.pullers.values():
                deliveries += self._reply(entry, puller)
            entry.pullers.clear()
        return deliveries

    def _on_pull(self, entry: Entry, pull: Pull, ticket: Ticket) -> list[Delivery]:
        rank = pull.sender.rank
        if entry.initialised:
            return self._reply(entry, Reader(pull.sender, [ticket]))
        earlier = entry.pullers.get(rank)
        entry.pullers[rank] = Reader(pull.sender, [*earlier.tickets, ticket] if earlier else [ticket])
        return self._release_orphans(entry)

    def _release_orphans(self, entry: Entry) -> list[Delivery]:
        """Who waits for first values waits in vain once rank 0, which brings them, is gone."""
        if entry.initialised or GIVER in self._workers.live:
            return []
        tickets = [ticket for puller in entry.pullers.values() for ticket in puller.tickets]
        entry.pullers.clear()
        return [Delivery(ticket, refusals.orphaned(entry.key)) for ticket in tickets]

    def _on_push(self, entry: Entry, push: Push, ticket: Ticket) -> list[Delivery]:
        match self._ledger.classify(push.sender, entry.key, push.clock):
            case Standing.NEW:
                return self._on_new(entry, push, ticket)
            case Standing.IN_PROGRESS:
                self._stats.duplicates += 1
                # The memory of the first try may go with its connection: the latest counts.
                tickets = entry.contributions[push.sender.rank].tickets
                entry.contributions[push.sender.rank] = self._contribution(push, [*tickets, ticket])
                return []
            case Standing.COMPLETED:
                self._stats.duplicates += 1
                return self._on_completed(entry, push, ticket)
            case Standing.GAP:
                return [self._out_of_order(push, ticket)]
            case Standing.FENCED:
                return [Delivery(ticket, refusals.fenced(push.sender, self._workers.epoch))]

    def _on_new(self, entry: Entry, push: Push, ticket: Ticket) -> list[Delivery]:
        rank = push.sender.rank
        if rank in entry.readers:
            # Else a worker that does not wait for its reads could outrun the staleness bound.
            return [self._out_of_order(push, ticket)]
        if self._consistency.lockstep and push.clock < entry.version:
            # The round closed without this gradient; its sender goes on with the current one.
            self._stats.dropped += 1
            self._settle(entry, push, [ticket], staleness=0)
            return self._answer(entry)
        self._stats.pushes += 1
        contribution = self._contribution(push, [ticket])
        self._ledger.begin(push.sender, entry.key)
        entry.contributions[rank] = contribution
        return self._turn(entry)

    def _contribution(self, push: Push, tickets: list[Ticket]) -> Contribution:
        return Contribution(push, tickets, self._memory.take(push.gradient, push.sender))

    def _on_completed(self, entry: Entry, push: Push, ticket: Ticket) -> list[Delivery]:
        """Answers a retry when the first try is answered."""
        rank = push.sender.rank
        settled = entry.settled.get(rank)
        if settled is None or settled.clock != push.clock:
            # An echo from an old connection: its sender has gone on since, and what it
            # waits for now must not be mixed up with this.
            return self._reply(entry, Reader(push.sender, [ticket], shown=is_placed(push.gradient)))
        reader = entry.readers.get(rank)
        tickets = [*reader.tickets, ticket] if reader else [ticket]
        entry.readers[rank] = Reader(push.sender, tickets, settled.staleness, is_placed(push.gradient))
        return self._answer(entry)

    # The rule.

    def _turn(self, entry: Entry) -> list[Delivery]:
        """Applies what may be applied, then answers whoever may read."""
        contributors = len(entry.contributions)
        if contributors and self._consistency.may_apply(contributors, len(self._workers.live)):
            try:
                self._close(entry)
            except NonFinite:
                return self._diverge(entry)
        return self._answer(entry)

    def _close(self, entry: Entry) -> None:
        before = entry.version
        contributions = entry.close(self._entries.scratch[entry.values.dtype])
        for push, tickets, _ in contributions:
            staleness = before - entry.read[push.sender.rank]
            self._stats.staleness[staleness] += 1
            self._ledger.advance(push.sender, entry.key, push.clock + 1)
            self._settle(entry, push, tickets, staleness)
        if self._consistency.lockstep:
            ranks = tuple(push.sender.rank for push, *_ in contributions)
            if ranks != self._workers.founders:
                self._stats.note_partial(entry.key, before, ranks)
        if self._capture is not None:
            self._capture.catch(entry, self._ledger)

    def _diverge(self, entry: Entry) -> list[Delivery]:
        """Ends the job: keys may be a step apart by now, and this one's values between two."""
        refusal = refusals.not_finite(entry, self._entries.scratch[entry.values.dtype])
        self.unsound = f"its parameters are in the midst of a step: {refusal.text}"
        return self.fail(refusal.text, refusal.code)

    def _settle(self, entry: Entry, push: Push, tickets: list[Ticket], staleness: int) -> None:
        """The push is over; its sender now waits to read."""
        entry.settled[push.sender.rank] = Settled(push.clock, staleness)
        entry.readers[push.sender.rank] = Reader(push.sender, tickets, staleness, is_placed(push.gradient))

    def _answer(self, entry: Entry) -> list[Delivery]:
        """Sends values to all readers that may go on."""
        if not entry.readers:
            return []
        clocks = self._ledger.clocks(entry.key)
        everyone = clocks.values()
        ready = [rank for rank in entry.readers if self._consistency.may_read(clocks[rank], everyone)]
        return [delivery for rank in ready for delivery in self._reply(entry, entry.readers.pop(rank))]

    def _reply(self, entry: Entry, reader: Reader) -> list[Delivery]:
        rank = reader.sender.rank
        contributes = rank in entry.contributions
        if self._consistency.lockstep and not contributes:
            # Rounds may have closed without this worker: it goes on with the open one.
            self._ledger.advance(reader.sender, entry.key, entry.version)
        entry.read[rank] = entry.version
        values = Values(
            key=entry.key,
            values=self._answer_to(entry, reader),
            clock=self._ledger.expected(reader.sender, entry.key),
            version=entry.version,
            staleness=reader.staleness,
            drain=entry.version >= entry.drain_from,
            # The next update needs a gradient from every live worker, and this one has not
            # given its own yet: until it does, nobody writes here. A worker that is dropped
            # meanwhile may see later bytes; it is fenced, so nothing it makes of them counts.
            # With backup workers, or in asynchronous modes, others can update without it.
            stable=self._leaves_alone and not contributes,
        )
        return [Delivery(ticket, values) for ticket in reader.tickets]

    def _answer_to(self, entry: Entry, reader: Reader) -> Tensor | Coded:
        if reader.shown:
            return self._memory.show(entry.values)
        answer = entry.answer
        return answer if isinstance(answer, Coded) else self._memory.send(answer)

    # Who takes part.

    def _seat(self, joined: Iterable[Sender]) -> None:
        """Joiners start at the open round, or without rounds at the slowest live worker's clock.

        Where nobody is left, or everything was restored, the clocks of those who
        were there last stand for the live ones.
        """
        joined = list(joined)
        stayed = self._workers.live.keys() - {sender.rank for sender in joined}
        if stayed:
            self._ledger.retain(stayed)
        for key, entry in self._entries.items():
            slowest = min(self._ledger.clocks(key).values(), default=0)
            for sender in joined:
                clock = entry.version if self._consistency.lockstep else slowest
                self._ledger.advance(sender, key, clock)
                entry.read[sender.rank] = entry.version
        if self._workers.live:
            self._ledger.retain(self._workers.live)

    # Refusals.

    def _refusal(self, request: Request) -> Refusal | None:
        """Why a request cannot even be looked at."""
        if self._failure is not None:
            return self._failure
        sender = request.sender
        if self._workers.live.get(sender.rank) != sender.incarnation:
            return refusals.fenced(sender, self._workers.epoch)
        return None if isinstance(request, Contribute) else refusals.unfit(self._entries, request)

    def _out_of_order(self, push: Push, ticket: Ticket) -> Delivery:
        expected = self._ledger.expected(push.sender, push.key)
        return Delivery(ticket, refusals.out_of_order(push, expected))
