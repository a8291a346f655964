"""KVStore: one shard's state machine. Requests and views in, replies out.

Laws:
- Every request, including every retry, gets exactly one reply, now or later.
- A push counts once, even if messages are retried, reordered or lost (`hubring.ps.store.key_state`).
- The mean over the actual contributors is applied when the policy allows it
  (`hubring.ps.store.consistency`). It is summed in rank order, so that reruns are bitwise equal.
- A worker that pushed gets values once its push is applied and the policy allows the read.
- A worker outside the view waits for nothing, and no worker waits for it.
- A gradient that is not finite fails the job before it reaches an optimizer on the hub or a worker.

The store never waits, sends or reads a clock, so that tests can replay every schedule of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from hubring.ps.core.counters import Stats
from hubring.ps.core.errors import NonFinite
from hubring.ps.core.messages import (
    Change,
    ClosedRound,
    Code,
    CollectiveResult,
    Contribute,
    Delivery,
    Init,
    Pull,
    Push,
    ReadState,
    Refusal,
    Request,
    StateReply,
    Ticket,
    Transfer,
    Write,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.types import BucketSpec, Sender, Slice, View
from hubring.ps.store import refusals, transfer
from hubring.ps.store.collective_rounds import RoundBook
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.key_state import Contribution, KeyEntry, Reader, Settled, Snapshot
from hubring.ps.store.key_table import Capture, KeyTable
from hubring.ps.store.parameter_memory import GpuMemory, HostMemory, ParameterMemory
from hubring.ps.store.rounds import LiveWorkers, PushRounds, Replica
from hubring.ps.store.script_changes import Disagreement

TRIAL_ROUNDS = 4
"""A key with more versions is of no trial of slices: the job takes steps, which no new worker can repeat."""
INITIAL_RANK = 0
"""The rank that sends a job's initial values."""


class KVStore:
    """The keys of one shard.

    Args:
        consistency: When a gradient counts, and which workers may read.
        memory: Where parameters and scratch are allocated; None uses this process's private memory.
    """

    def __init__(self, consistency: Consistency, memory: ParameterMemory | None = None) -> None:
        self._consistency = consistency
        self._replica: Replica | None = None
        self._memory = memory or HostMemory()
        self._gpu = memory if isinstance(memory, GpuMemory) else None
        self._workers = LiveWorkers()
        self._rounds = RoundBook()
        self._capture: Capture | None = None
        self._draining = False
        self._failure: Refusal | None = None
        self.unsound = ""
        """Why the parameters must not be saved; empty if they may be saved."""
        self._begin(KeyTable())

    # Requests of the coordinator.

    def assign(self, slices: Sequence[Slice], buckets: Sequence[BucketSpec]) -> None:
        """Creates this shard's slices, zeroed. Resets the counters, which counted only trials.

        Raises:
            ConfigError: The hub does not support a bucket's dtype or optimizer.
        """
        self._begin(self._table(slices, buckets))
        self._start_clocks(self._workers.senders())
        if self._draining:
            self.drain()

    def extend(
        self,
        slices: Sequence[Slice],
        buckets: Sequence[BucketSpec],
        version: int,
        saved: Snapshot | None = None,
    ) -> None:
        """Adds this shard's slices of buckets that join the job between two steps, zeroed or restored.

        Args:
            slices: Slices with new keys.
            buckets: The buckets of the slices.
            version: In lockstep modes, the version of the other keys, so that all keys stay at one step.
            saved: The checkpoint that has the new keys; None if rank 0 sends their first values.

        Raises:
            ConfigError: The hub does not support a bucket's dtype or optimizer.
            CheckpointCorrupt: A new key is missing, or has another size.
        """
        more = self._table(slices, buckets, extends=True)
        if saved is not None:
            more.restore(saved)
        if self._consistency.lockstep:
            more.reach(version)
        more.start_clocks(self._workers.senders(), lockstep=self._consistency.lockstep)
        self._entries.extend(more)
        if self._draining:
            self.drain()
        if self._capture is not None:
            self._capture.expect(more.values())

    def _begin(self, entries: KeyTable) -> None:
        self._entries, self._stats = entries, Stats()
        self._pushes = PushRounds(self._consistency, self._workers, self._stats, self._gpu, self._replica)

    def _table(
        self, slices: Sequence[Slice], buckets: Sequence[BucketSpec], *, extends: bool = False
    ) -> KeyTable:
        return KeyTable.make(
            slices,
            {bucket.index: bucket for bucket in buckets},
            self._memory,
            finite=self._consistency.finite,
            shown=self._gpu is not None and self._consistency.stable,
            extends=extends,
        )

    def restore(self, snapshot: Snapshot, step: int | None = None) -> None:
        """Restores a checkpoint, also with keys of other shards.

        In lockstep modes all keys start at `step`, if given. In the other modes each rank continues its own
        clocks, and a rank that the checkpoint does not know starts at `step`.

        Raises:
            CheckpointCorrupt: A key of this shard is missing, or has another size.
        """
        self._entries.restore(snapshot, step if self._consistency.lockstep else None)
        self._start_clocks(self._workers.senders(), step)

    def on_view(self, view: View) -> list[Delivery]:
        """Applies a view; ignores a view with an older epoch than the last."""
        if (change := self._workers.update(view)) is None:
            return []
        left, joined = change
        deliveries = [
            Delivery(ticket, refusals.fenced(sender, view.epoch))
            for sender in left
            for entry in self._entries.values()
            for ticket in entry.forget([sender.rank])
        ]
        if self._gpu is not None:
            self._gpu.retain(self._workers.senders())
        self._start_clocks(joined)
        for entry in self._entries.values():
            deliveries += self._advance(entry) + self._refuse_orphans(entry)
        return deliveries + self._rounds.on_view(self._workers.live)

    def drain(self) -> None:
        """Marks all replies from the next update of each key on: the job ends after this step.

        In lockstep modes the next update is a round, so all ranks get the mark in the same step.
        """
        self._draining = True
        for entry in self._entries.values():
            entry.drain_from = min(entry.drain_from, entry.version + self._consistency.lockstep)

    def is_live(self, sender: Sender) -> bool:
        """Whether a sender is a worker of the last view."""
        return self._workers.live.get(sender.rank) == sender.incarnation

    def fail(self, text: str, code: Code = Code.JOB_FAILED) -> list[Delivery]:
        """Refuses all waiting and later requests. The first cause counts."""
        self._failure = self._failure or Refusal(code, text)
        waiting = [ticket for entry in self._entries.values() for ticket in entry.forget(entry.waiting())]
        refused = self._rounds.refuse_all(self._failure)
        return [Delivery(ticket, self._failure) for ticket in waiting] + refused

    # Snapshots.

    def capture_at(self, version: int | None) -> bool:
        """Begins a snapshot that copies every key when it reaches `version` (None: at once).

        A key without values is copied when it gets its initial values.

        Returns:
            False, without a snapshot, if some key has passed that version.
        """
        capture = Capture.begin(version, self._entries.values())
        self._capture = capture or self._capture
        return capture is not None

    def captured(self) -> Snapshot | None:
        """Returns the snapshot, once, when it contains every key."""
        if self._capture is None or not self._capture.complete:
            return None
        snapshot, self._capture = self._capture.caught, None
        return snapshot

    def stop_capture(self) -> None:
        """Cancels the snapshot in progress."""
        self._capture = None

    def name_unsound(self, key: int, values: Tensor) -> str:
        """Returns which parameter is not finite in a copy of a key's values, as a clause."""
        return refusals.unsound(self._entries[key], values)

    def stats(self) -> Stats:
        """Returns the counters, with the current versions."""
        versions = [entry.version for entry in self._entries.values()]
        self._stats.keys = len(versions)
        self._stats.oldest, self._stats.newest = min(versions, default=0), max(versions, default=0)
        self._stats.collectives, self._stats.repeatable = self._rounds.closed, self._rounds.repeatable
        return self._stats

    # Requests of workers.

    def handle(self, request: Request, ticket: Ticket) -> list[Delivery]:
        """Handles one request; returns the replies to it and to other requests that it completes."""
        rank, incarnation = request.sender
        if self._failure is not None:
            return [Delivery(ticket, self._failure)]
        if self._workers.live.get(rank) != incarnation:
            return [Delivery(ticket, refusals.fenced(request.sender, self._workers.epoch))]
        if refusal := refusals.unfit(self._entries, request):
            return [Delivery(ticket, refusal)]
        if self._replica is not None and not isinstance(request, Push | Pull | ReadState):
            self._replica.append(request)
        match request:
            case Push():
                return self._on_push(self._entries[request.key], request, ticket)
            case Pull():
                return self._on_pull(self._entries[request.key], request, ticket)
            case Init():
                return self._on_init(self._entries[request.key], request, ticket)
            case WriteParameters() | WriteState():
                return self._on_write(self._entries[request.key], request, ticket)
            case ReadState():
                entry = self._entries[request.key]
                state = entry.writes.state_of(rank) or entry.state()
                return [Delivery(ticket, StateReply(entry.key, entry.version, state.on_host()))]
            case Contribute():
                return self._rounds.contribute(request, ticket, self._workers.live)

    def replicate(self, replica: Replica | None) -> None:
        """Forwards all changes by workers from now on; None ends it."""
        self._replica = self._pushes.replica = replica

    def transfer(self, restored: Sequence[int] | None = None) -> Iterator[Change]:
        """Yields the state since the last plan and view, or only that of restored keys, for a standby."""
        return transfer.changes(self._entries, self._rounds, restored)

    def apply(self, done: ClosedRound | Transfer) -> None:
        """Applies a round that this store's primary closed, or a part of the primary's state."""
        if isinstance(done, Transfer):
            transfer.take(done, self._entries, self._rounds)
            if done.key in self._entries:
                self._pushes.follow(self._entries[done.key])
            return
        entry = self._entries[done.key]
        self._pushes.apply(entry, done, self._entries.scratch[entry.optimizer.dtype])

    def _on_init(self, entry: KeyEntry, init: Init, ticket: Ticket) -> list[Delivery]:
        deliveries = [Delivery(ticket, CollectiveResult())]
        if not entry.initialised:
            entry.write(init.values, init.state)
            entry.initialised = True
            if self._capture is not None:
                self._capture.catch(entry)
            for puller in entry.pullers.values():
                deliveries += self._pushes.reply(entry, puller)
            entry.pullers.clear()
        return deliveries

    def _on_write(self, entry: KeyEntry, write: Write, ticket: Ticket) -> list[Delivery]:
        """Keeps a write for the round of its sender's next push; without rounds, applies it at once."""
        lockstep, live = self._consistency.lockstep, len(self._workers.live)
        expected = entry.clocks[write.sender.rank]
        if write.clock > expected:
            return [Delivery(ticket, refusals.out_of_order(write, expected))]
        if not lockstep and live > 1 and isinstance(write, WriteParameters):
            # Other workers may be about to push gradients of the old parameters.
            return [Delivery(ticket, refusals.crowded(entry, write.sender, live))]
        # A write for a step that is over changes nothing: it is a late retry, or its sender missed the round.
        if write.clock == (entry.version if lockstep else expected) and entry.writes.is_newest(write):
            entry.writes.put(write)
            if not lockstep:  # and again until a push: a state's master is of parameters that come after it
                entry.write(*entry.writes.agreed([write.sender.rank], entry.values))
        return [Delivery(ticket, CollectiveResult())]

    def _on_pull(self, entry: KeyEntry, pull: Pull, ticket: Ticket) -> list[Delivery]:
        rank = pull.sender.rank
        if entry.initialised:
            return self._pushes.reply(entry, Reader(pull.sender, [ticket]))
        earlier = entry.pullers.get(rank)
        entry.pullers[rank] = Reader(pull.sender, [*earlier.tickets, ticket] if earlier else [ticket])
        return self._refuse_orphans(entry)

    def _refuse_orphans(self, entry: KeyEntry) -> list[Delivery]:
        """Refuses the workers that wait for initial values if rank 0, which sends them, is lost."""
        if entry.initialised or INITIAL_RANK in self._workers.live:
            return []
        tickets = [ticket for puller in entry.pullers.values() for ticket in puller.tickets]
        entry.pullers.clear()
        return [Delivery(ticket, refusals.orphaned(entry.key)) for ticket in tickets]

    def _on_push(self, entry: KeyEntry, push: Push, ticket: Ticket) -> list[Delivery]:
        rank = push.sender.rank
        if push.clock < entry.clocks[rank]:
            self._stats.duplicates += 1
            return self._on_completed(entry, push, ticket)
        # A worker that pushes before it has read the reply to its last push could exceed the staleness bound.
        if push.clock > entry.clocks[rank] or rank in entry.readers:
            return [Delivery(ticket, refusals.out_of_order(push, entry.clocks[rank]))]
        if self._consistency.lockstep and push.clock < entry.version:
            # The round closed without this gradient; its sender continues with the current round.
            self._stats.dropped += 1
            entry.settle(push, [ticket], Settled(push.clock))
            return self._pushes.answer(entry)
        if push.covers and (refusal := refusals.uncoverable(entry, push, self._consistency)):
            return [Delivery(ticket, refusal)]
        gradient = push.gradient if self._gpu is None else self._gpu.take(push.gradient, push.sender)
        # The first try's memory may be freed with its connection, so use the latest try's.
        earlier = entry.contributions.get(rank)
        more = int(earlier is None and rank not in entry.covered)
        contribution = Contribution(push, [*earlier.tickets, ticket] if earlier else [ticket], gradient)
        entry.contributions[rank] = contribution
        for covered in push.covers:
            if self.is_live(covered):
                more += covered.rank not in entry.contributions and covered.rank not in entry.covered
                entry.covered[covered.rank] = contribution
        self._stats.pushes += more
        self._stats.duplicates += not more
        return self._advance(entry) if more else []

    def _on_completed(self, entry: KeyEntry, push: Push, ticket: Ticket) -> list[Delivery]:
        """Answers a retry together with the first try."""
        rank = push.sender.rank
        settled = entry.settled.get(rank, Settled(entry.clocks[rank] - 1))  # none after a restore
        if settled.clock != push.clock:
            # A late message from an old connection, or of a resumed worker whose push the checkpoint has.
            # Answer it separately from the request that the sender waits for now.
            return self._pushes.reply(entry, entry.reader_after(push, [ticket], Settled(push.clock)))
        reader = entry.readers.get(rank)
        tickets = [*reader.tickets, ticket] if reader else [ticket]
        entry.readers[rank] = entry.reader_after(push, tickets, settled)
        return self._pushes.answer(entry)

    # The consistency rule.

    def _advance(self, entry: KeyEntry) -> list[Delivery]:
        """Closes the round if the policy allows it, then answers the readers that may read."""
        pushed, covered = entry.contributions, entry.covered
        contributors = len(pushed.keys() | covered if covered else pushed)
        if contributors and self._consistency.may_apply(contributors, len(self._workers.live)):
            refusal = refusals.unpaired(entry, self._workers.finished) if entry.averages else None
            if refusal is not None:
                return self.fail(refusal.text, refusal.code)
            try:
                self._pushes.close(entry, self._entries.scratch[entry.optimizer.dtype])
            except NonFinite:
                return self._diverge(entry)
            except Disagreement as found:
                refusal = refusals.disagreeing(entry, found)
                return self.fail(refusal.text, refusal.code)
            if self._capture is not None:
                self._capture.catch(entry)
            if entry.version > TRIAL_ROUNDS and self._rounds.kept is not None:
                self._rounds.drop_results()
        return self._pushes.answer(entry) if entry.readers else []

    def _diverge(self, entry: KeyEntry) -> list[Delivery]:
        """Fails the job: keys may be at different steps, and this key's values between two steps."""
        refusal = refusals.not_finite(entry, self._entries.scratch[entry.optimizer.dtype])
        self.unsound = f"its parameters are in the middle of a step: {refusal.text}"
        return self.fail(refusal.text, refusal.code)

    def _start_clocks(self, joined: Sequence[Sender], first: int | None = None) -> None:
        lockstep, live = self._consistency.lockstep, self._workers.live
        self._entries.admit(joined, live, lockstep=lockstep, first=first)
