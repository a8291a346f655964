"""How a member of a ring that heals gets into the next generation.

It finds the members, connects to them, and gives those that lack something of the generation before what it
has.

Law of exchanges: members complete the same exchanges, in one order. An exchange is what is sent before a
wait. It is complete on a member once every bucket has its mean there, and only then do means replace
gradients. So after a loss, a member either has all means of an exchange or all its own gradients, and can
exchange them again. A member completes an exchange only with the gradients of all others, so no member is
more than one exchange ahead. The means of the last complete exchange are kept, for a member that has lost
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from hubring.ps.client.rendezvous import Board
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.ring import collectives
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.group import RingStore
from hubring.workers.communicators.ring.healing.samples import Epoch, Position, Samples
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.communicators.ring.results import CallResult, CallResults, results_of

CONNECT_SECONDS, CONNECT_NCCL_SECONDS = 10.0, 60.0
"""How long members may take to connect. If one is lost meanwhile, they meet again within this time."""


@dataclass(eq=False, slots=True)
class SentBucket:
    """One bucket's part of an exchange.

    Attributes:
        bucket: The bucket. Its memory has this member's gradients until the exchange is complete.
        wire: A copy that becomes the mean, and behind it one element that is not zero if a member knows of
            newcomers.
        arrived: Whether `wire` is the mean.
        filled: When a GPU has filled the wire.
    """

    bucket: Bucket
    wire: Tensor
    arrived: bool = False
    filled: torch.cuda.Event | None = None

    def fill(self, *, newcomers: bool) -> None:
        """Copies the gradients to the wire."""
        self.wire[:-1].copy_(self.bucket.memory)
        self.wire[-1] = float(newcomers)
        if self.wire.is_cuda:
            self.filled = torch.cuda.current_stream(self.wire.device).record_event()

    def ready(self) -> Tensor:
        """Returns the wire for this thread, whose stream waits until another thread's has filled it."""
        if self.filled is not None:
            torch.cuda.current_stream(self.wire.device).wait_event(self.filled)
        return self.wire


@dataclass(eq=False, slots=True)
class LoggedExchange:
    """One exchange.

    Attributes:
        number: Counts the exchanges.
        step: Completed steps when it began.
        sent: Its buckets, in order.
        closed: Whether a wait has begun, so that nothing more is sent.
    """

    number: int
    step: int
    sent: list[SentBucket] = field(default_factory=list)
    closed: bool = False

    @property
    def complete(self) -> bool:
        return self.closed and all(one.arrived for one in self.sent)

    @property
    def knows_newcomers(self) -> bool:
        """Whether a member knew of newcomers. All members that completed the exchange agree."""
        return any(bool(one.wire[-1]) for one in self.sent)


class ExchangeLog:
    """The last complete exchange and the one in flight. Not safe to use from several threads at once."""

    def __init__(self) -> None:
        self.last = LoggedExchange(0, -1, closed=True)
        self.in_flight: LoggedExchange | None = None
        self._free: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    @property
    def latest(self) -> LoggedExchange:
        """The last exchange that is complete on this member, whether or not its means are in place."""
        here = self.in_flight
        return here if here is not None and here.complete else self.last

    @property
    def step(self) -> int:
        """Completed steps, counted by exchanges."""
        here = self.latest
        return here.step + 1 if self.in_flight is None or self.in_flight is here else self.in_flight.step

    def send(self, bucket: Bucket, step: int, *, newcomers: bool) -> tuple[LoggedExchange, SentBucket]:
        """Adds a bucket to the exchange in flight, or to a new one."""
        if self.in_flight is None:
            self.in_flight = LoggedExchange(self.last.number + 1, step)
        one = SentBucket(bucket, self._wire(bucket.memory))
        one.fill(newcomers=newcomers)
        self.in_flight.sent.append(one)
        return self.in_flight, one

    def complete(self) -> LoggedExchange:
        """Replaces the gradients with the means of the exchange in flight, which is complete."""
        exchange, self.in_flight = self.in_flight, None
        assert exchange is not None
        for one in exchange.sent:
            one.bucket.memory.copy_(one.wire[:-1])
        for one in self.last.sent:
            self._free[one.wire.numel(), one.wire.dtype, one.wire.device].append(one.wire)
        self.last = exchange
        return exchange

    def begin_again(self, *, newcomers: bool) -> None:
        """Prepares an exchange that is not complete to be sent again, in other memory."""
        if self.in_flight is None or self.in_flight.complete:
            return
        for one in self.in_flight.sent:
            one.wire, one.arrived = torch.empty_like(one.ready()), False
            one.fill(newcomers=newcomers)

    def follow(self, position: int, step: int) -> None:
        """Continues at the position of the other members, on a newcomer."""
        self.last = LoggedExchange(position, step - 1, closed=True)

    def _wire(self, memory: Tensor) -> Tensor:
        free = self._free[memory.numel() + 1, memory.dtype, memory.device]
        return free.pop() if free else memory.new_empty(memory.numel() + 1)


Settle = Callable[[LoggedExchange, float | None], None]
"""Waits until an exchange is complete, at most the given seconds."""


class ExchangeWork(Work):
    """A bucket's part of an exchange. All parts are done together, once one of them is waited for.

    Args:
        what: See `Work`.
        exchange: The exchange.
        settle: See `Settle`.
    """

    def __init__(self, what: str, exchange: LoggedExchange, settle: Settle) -> None:
        super().__init__(what)
        self._exchange, self._settle = exchange, settle

    def wait(self, timeout: float | None = None) -> None:
        self._settle(self._exchange, timeout)
        self.complete_part()


class Note(NamedTuple):
    """What a member tells the others when it comes to a meeting.

    Attributes:
        rank: Its rank in the generation that it leaves.
        exchanges: Its last complete exchange.
        step: Its completed steps.
        collectives: Its last complete collective.
        positions: Its position in the samples of each sampler.
        histories: What a newcomer must know of each sampler, by iteration.
        sends: The numbers of the transfers that it has begun to send, and sends again.
    """

    rank: int
    exchanges: int
    step: int
    collectives: int
    positions: tuple[Position, ...] = ()
    histories: tuple[dict[int, Epoch], ...] = ()
    sends: tuple[int, ...] = ()


class Agreed(NamedTuple):
    """A generation that the server has named. All its members know the same of it.

    Attributes:
        members: The members' ranks in the job, by rank in the ring.
        notes: The members' notes, by rank in the ring.
        stays: The ranks that the first of the members had in the generation before. The others are newcomers.
        boundary: Whether all members are between the same two steps.
    """

    number: int
    members: tuple[int, ...]
    notes: tuple[Note, ...]
    stays: tuple[int, ...]
    boundary: bool

    @property
    def old_notes(self) -> tuple[Note, ...]:
        """The notes of the members that have a state; of all in the first generation."""
        return self.notes[: len(self.stays)] or self.notes

    @property
    def step(self) -> int:
        """The completed steps of the member that is ahead."""
        return max(note.step for note in self.old_notes)


class RingMeeting:
    """The meetings of one member.

    Args:
        identity: The member's rank in the job.
        host: Its address for the other members.
        board: Where the members meet, and publish what others must know to connect.
        backend: As for `AllreduceCommunicator`.
        compress: As for `AllreduceCommunicator`.
        device: As for `AllreduceCommunicator`.
        timeout: As for `AllreduceCommunicator`.
        local: As for `AllreduceCommunicator`.
    """

    def __init__(
        self,
        identity: int,
        host: str,
        board: Board,
        *,
        backend: str | None = None,
        compress: str = "",
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
        local: str = "",
    ) -> None:
        self.identity = identity
        self.compress = compress
        self._board = board
        self._connect_seconds = CONNECT_NCCL_SECONDS if backend == "nccl" else CONNECT_SECONDS
        self._make = partial(
            AllreduceCommunicator,
            host=host,
            backend=backend,
            compress=compress,
            device=device,
            timeout=timeout,
            connect_timeout=self._connect_seconds,
            local=local,
        )

    def agree(self, generation: int, note: Note, *, boundary: bool) -> Agreed:
        """Waits for the generation after this one.

        Args:
            generation: The generation that this member leaves; 0 for none.
            note: What the other members must know.
            boundary: Whether this member is between two steps.

        Raises:
            HubringError: The job has failed.
        """
        named = self._board.regroup(generation, msgspec.json.encode(note).decode(), boundary=boundary)
        members = tuple(member.rank for member in named.members)
        notes = tuple(_notes.decode(member.note) for member in named.members)
        stays = tuple(note.rank for note, one in zip(notes, named.members, strict=True) if not one.newcomer)
        return Agreed(named.number, members, notes, stays, named.boundary)

    def connect(self, agreed: Agreed, results: CallResults) -> AllreduceCommunicator:
        """Opens the ring of a generation.

        Args:
            agreed: The generation.
            results: Keeps results of collectives.

        Raises:
            RingBroken: The members could not connect. They meet again.
            HubringError: The job has failed.
        """
        rank = agreed.members.index(self.identity)
        store = RingStore(self._board, f"ring.{agreed.number}", self._connect_seconds, agreed.number)
        ring = self._make(rank, len(agreed.members), store, results=results)
        ring.connect()
        return ring


_notes = msgspec.json.Decoder(Note)


TakeOver = Callable[[Sequence[CallResult]], None]
"""Ends this member's calls with results."""


def catch_up(
    agreed: Agreed,
    ring: AllreduceCommunicator,
    exchanges: ExchangeLog,
    results: CallResults,
    take_over: TakeOver,
) -> None:
    """Brings all members to the position of the one that is ahead. Every member calls it.

    Raises:
        RingBroken: A member is lost. What this member has got stays valid.
    """
    old = agreed.old_notes
    done, performed = max(note.exchanges for note in old), max(note.collectives for note in old)
    lacks_means = any(note.exchanges < done for note in old)
    lacks_results = any(note.collectives < performed for note in old)
    if lacks_means:
        _give_means(agreed, ring.ring, exchanges, done)
    if lacks_results:
        _give_results(agreed, ring.ring, results, performed, take_over)
    if lacks_means or lacks_results:  # no member goes on before all have what they lacked
        ring.ring.gather("catching up", torch.zeros(1, dtype=torch.uint8, device=ring.ring.device))


def _give_means(agreed: Agreed, ring: Ring, exchanges: ExchangeLog, done: int) -> None:
    """Gives the means of exchange `done` to the members that lack them."""
    source = next(rank for rank, note in enumerate(agreed.old_notes) if note.exchanges == done)
    here = exchanges.latest if exchanges.latest.number == done else exchanges.in_flight
    assert here is not None
    for sent in here.sent:
        collectives.broadcast_into(ring, sent.wire, source, "the means of a complete exchange")
    for sent in here.sent:
        sent.arrived = True
    here.closed = True


def _give_results(
    agreed: Agreed, ring: Ring, results: CallResults, performed: int, take_over: TakeOver
) -> None:
    """Gives results of collectives to the members that lack them."""
    counts = [note.collectives for note in agreed.old_notes]
    source = counts.index(performed)
    own = (
        results.after(min(counts)) if ring.rank == source else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    given = ring.gather("results of collectives", own.to(ring.device))[source]
    if ring.rank < len(counts) and counts[ring.rank] < performed:
        missing = [one for one in results_of(given) if one.number > counts[ring.rank]]
        results.extend(missing)
        take_over(missing)


def deal_samples(place: int, samples: Samples, agreed: Agreed, identity: int) -> None:
    """Deals the samples of one sampler to the members of a generation.

    Args:
        place: Counts the samplers of a member.
        samples: What deals this member's.
        agreed: The generation.
        identity: This member's rank in the job.
    """
    rank = agreed.members.index(identity)
    notes = [note for note in agreed.old_notes if place < len(note.positions)]
    if rank >= len(agreed.old_notes) and notes:
        samples.follow(notes[0].histories[place], agreed.step)
    positions = [note.positions[place] for note in notes]
    samples.change(positions, agreed.stays, rank, len(agreed.members))
