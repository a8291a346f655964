"""Two levels on a hub: the workers of one host add their gradients in shared memory, and push each sum once.

Each member pushes some slices of each bucket for all members (`Push.covers`), and the answers return through
shared memory. So the host's link carries the model once a step.

Law: all members take the same buckets in one order. One thread of each adds them, another one passes answers
on; neither waits for the other. Once anything fails, this worker has one level for good. Of each bucket in
flight it pushes its own gradients of the slices that it has not pushed for all. The hub adds none of them
twice, because a push that covers this worker's wins. A gradient stays until the answer to its slice is there.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue

import torch
from torch import Tensor

from hubring.ps.client.client import KVClient
from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.types import INCARNATION_BYTES, Sender, Slice, StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.staging import Allocate
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.host import meeting
from hubring.workers.communicators.host.reductions import SUM
from hubring.workers.communicators.host.shared_memory import HostExchange
from hubring.workers.communicators.slice_exchange import Absence, SliceExchange, exchange_name

log = logging.getLogger(__name__)

_MEETING = "--local: which workers share a host"
_PASSED_BYTES = 28
_EXCHANGES = 2
"""One adds gradients, one returns answers."""


@dataclass(eq=False)
class _Load:
    """A bucket in flight.

    Attributes:
        absence: This rank's parameters without a gradient, for its own pushes.
        reports: As in `Absence`.
        written: `KVClient.written` when it was sent.
        parts: The slices that each member pushes, which are adjacent.
        absent: Those that all members lack, and in the end all ranks.
        mine: The exchange of the slices that this member pushes for all; None before it begins.
        both: The exchange of these slices, and of the others.
    """

    exchange: SliceExchange
    bucket: Bucket
    into: Tensor
    hyper: StepHyper
    absence: Absence | None
    reports: bool
    written: int
    parts: Sequence[Sequence[Slice]]
    absent: frozenset[int] = frozenset()
    mine: Work | None = None
    work: Work = field(init=False)
    both: Work = field(init=False)

    def __post_init__(self) -> None:
        self.absent = self.bucket.absent
        name = exchange_name(self.index)
        self.work, self.both = Work(name), Work(name, 2)
        self.both.when_done(self._finish)

    @property
    def index(self) -> int:
        return self.bucket.spec.index

    def ended(self, part: Work) -> None:
        """Records that the exchange of some slices is over."""
        if part.error is not None:
            self.both.fail(part.error)
        else:
            self.both.complete_part()

    def _finish(self, _: Work) -> None:
        if self.both.error is not None:
            self.work.fail(self.both.error)
            return
        if self.reports:
            self.bucket.absent &= self.absent
        self.work.complete_part()


class HostLevel:
    """One member's exchange with the members on its host, and for them.

    Args:
        client: Connections to the shards.
        members: All members, in rank order.
        own: This member's place among them.
        adding: Connects the members while they add gradients.
        returning: Connects them while they pass answers on.
        allocate: Makes memory for the sums.
    """

    def __init__(
        self,
        client: KVClient,
        members: Sequence[Sender],
        own: int,
        adding: HostExchange,
        returning: HostExchange,
        allocate: Allocate,
    ) -> None:
        self._client = client
        self._own, self._size = own, len(members)
        self._covers = tuple(sender for sender in members if sender != client.sender)
        self._adding, self._returning = adding, returning
        self._allocate = allocate
        self._sums: dict[int, Tensor] = {}
        """By bucket index."""
        self._lock = threading.RLock()
        self._flying: list[_Load] = []
        self._ended = ""
        """Why there is one level now."""
        self._told = False
        self._ready, self._pushed = SimpleQueue[_Load | None](), SimpleQueue[_Load | None]()
        for name, *given in (
            ("adds on this host", self._ready, self._add),
            ("returns on this host", self._pushed, self._return),
        ):
            threading.Thread(target=self._run, args=given, name=name, daemon=True).start()

    def push_pull(
        self,
        exchange: SliceExchange,
        bucket: Bucket,
        into: Tensor,
        hyper: StepHyper,
        absence: Absence | None,
        *,
        reports: bool,
    ) -> Work | None:
        """Starts the exchange of a bucket, as `SliceExchange.push_pull`; None if there is one level now.

        `reports` is that of `Absence`.
        """
        with self._lock:
            if self._ended:
                if not self._told:
                    why = self._ended.removesuffix(". Restart the job")
                    log.warning("--local: this worker pushes its own gradients from now on: %s", why)
                self._told = True
                return None
            slices, index = exchange.slices[bucket.spec.index], bucket.spec.index
            ends = [len(slices) * member // self._size for member in range(self._size + 1)]
            parts = [slices[start:stop] for start, stop in pairwise(ends)]
            turned = [parts[(member + index) % self._size] for member in range(self._size)]  # few slices, too
            load = _Load(exchange, bucket, into, hyper, absence, reports, self._client.written, turned)
            self._flying.append(load)
            self._ready.put(load)
            return load.work

    @property
    def waits(self) -> bool:
        """Whether a thread waits for another member."""
        return self._adding.in_use or self._returning.in_use

    def close(self, reason: str) -> None:
        """Ends both levels. Its threads end once the client is closed."""
        self._end(RingBroken(reason))
        for queue in (self._ready, self._pushed):
            queue.put(None)

    def _run(self, loads: SimpleQueue[_Load | None], act: Callable[[_Load], None]) -> None:
        torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
        while (load := loads.get()) is not None:
            try:
                if not self._ended:
                    act(load)
            except HubringError as error:
                self._end(error)
            except Exception as error:  # any error: a caller waits for the load
                self._end(HubringError(f"{error!r}"))
            del load  # an idle thread must not keep tensors alive

    # Adding.

    def _add(self, load: _Load) -> None:
        """Adds a bucket, and pushes this member's slices of the sum."""
        gradients = load.bucket.host_gradients
        total = self._sums.get(load.index)
        if total is None or (total.numel(), total.dtype) != (gradients.numel(), gradients.dtype):
            total = self._sums[load.index] = self._allocate(gradients.numel(), gradients.dtype)
        head = f"{load.index} {load.written} {load.hyper}"
        heads, absent = self._tell_each_other(self._adding, head, load.absent)
        if len(set(heads)) > 1:  # each pushes its own, and the hub names what differs, or excuses it
            raise ConfigError("the workers of this host differ in steps, options or changed parameters")
        self._adding.reduce(total, SUM, gradients)
        with self._lock:
            if self._ended:
                return
            load.absent = absent
            load.mine = load.exchange.push_pull(
                load.index,
                total,
                load.into,
                load.hyper,
                Absence(load, reports=True) if absent else None,
                slices=load.parts[self._own],
                covers=self._covers,
            )
        load.mine.when_done(load.ended)
        self._pushed.put(load)

    def _tell_each_other(
        self, exchange: HostExchange, head: str, absent: frozenset[int]
    ) -> tuple[list[bytes], frozenset[int]]:
        """Returns what all members say, and what is absent on all of them."""
        given = bytearray(f"{head}\0{' '.join(map(str, absent))}".encode())
        exchange.begin_gather(memoryview(given))
        came = [bytes(one).partition(b"\0") for one in exchange.end_gather() or ()]
        positions = [frozenset(map(int, tail.split())) for _, _, tail in came]
        return [said for said, _, _ in came], positions[0].intersection(*positions[1:])

    # Passing answers on.

    def _return(self, load: _Load) -> None:
        """Waits for the answers to this member's slices, and exchanges them for those of the others."""
        assert load.mine is not None, "the load was pushed"
        load.mine.wait()
        has_first = any(piece.key == 0 for piece in load.parts[self._own])
        said = has_first and self._client.draining, has_first and self._client.saved
        heads, absent = self._tell_each_other(self._returning, f"{said[0]:d}{said[1]:d}", load.absent)
        into = []
        for part in load.parts:
            start, stop = (part[0].offset, part[-1].offset + part[-1].numel) if part else (0, 0)
            into.append(load.into[start:stop].view(torch.uint8))
        self._returning.allgather(into[self._own], into)
        drain, saved = (any(head[at : at + 1] == b"1" for head in heads) for at in range(2))
        with self._lock:
            if self._ended:
                return  # the hub answers all of it again
            self._flying.remove(load)
            others = [piece.key for part in load.parts if part is not load.parts[self._own] for piece in part]
            self._client.advance(others, drain=drain, saved=saved and not said[1])
        load.absent = absent
        load.both.complete_part()

    # The end.

    def _end(self, error: HubringError) -> None:
        """Ends both levels, and pushes what is left of the loads in flight."""
        with self._lock:
            if self._ended:
                return
            self._ended = str(error)
            for exchange in (self._adding, self._returning):
                exchange.close(self._ended)  # from here on no thread writes to what the hub answers again
            flying, self._flying = self._flying, []
            for load in flying:
                mine = load.parts[self._own] if load.mine is not None else ()
                rest = [piece for part in load.parts for piece in part if piece not in mine]
                given = load.index, load.bucket.host_gradients, load.into, load.hyper, load.absence
                load.exchange.push_pull(*given, slices=rest).when_done(load.ended)
                load.exchange.drop_residuals(rest)  # the hub may have these gradients in a sum
                if load.mine is None:
                    load.both.complete_part()


def meet(communicator: Communicator, client: KVClient, host: str) -> HostLevel | None:
    """Connects the workers of each host. All workers of the job call it at the same time.

    Args:
        communicator: Connects the workers.
        client: This worker's connections to the shards.
        host: Equal for the workers of one host; empty for a worker that pushes its own gradients.

    Returns:
        None if this worker pushes its own gradients.
    """
    own, size = communicator.rank, communicator.size

    def gather(given: bytes) -> list[bytes]:
        """Returns what the workers pass; nothing at all if this one is in the place of a lost one."""
        passed = (bytes([len(given)]) + given).ljust(_PASSED_BYTES, b"\0")
        call = Call(Collective.ALLGATHER, _MEETING)
        found = meeting.by_rank(communicator.collective(call, meeting.row_of(own, passed)).get())
        if found.get(own) != passed:  # the hub has kept what the worker before this one passed
            return [b""] * size
        return [found[rank][1 : 1 + found[rank][0]] if rank in found else b"" for rank in range(size)]

    name = hashlib.sha256(host.encode()).digest()[:16] if host else secrets.token_bytes(16)
    ranks = [rank for rank, one in enumerate(gather(name)) if one == name]
    if len(ranks) < 2:
        if host and ranks:
            log.info("--local has no effect for rank %d: it shares its host with no other worker", own)
        for _ in range(_EXCHANGES * meeting.GATHERS):  # with the workers of other hosts
            gather(b"")
        return None

    def among(given: bytes) -> list[bytes]:
        all_given = gather(given)
        return [all_given[rank] for rank in ranks]

    place, opened = ranks.index(own), list[HostExchange]()
    why = "one of them cannot reach another's memory"
    for number in range(_EXCHANGES):  # both, whatever becomes of the first: others may have it
        watch = meeting.Watch(communicator, f"{_MEETING} {number}", own, [one for one in ranks if one != own])
        try:
            connected = meeting.connect(among, "the workers of a host", ranks, place, watch.lost)
        except RingBroken as error:
            why, connected = str(error), None
        if connected is not None:
            connected.timeout = communicator.timeout or connected.timeout
            opened.append(connected)
    if len(opened) == _EXCHANGES:
        try:
            members = _members(opened[0], client.sender, ranks)
        except RingBroken as error:
            why = str(error)
        else:
            if not place:
                named = ", ".join(map(str, ranks))
                log.info("ranks %s are on one host: each sum of their gradients is pushed once", named)
            return HostLevel(client, members, place, opened[0], opened[1], communicator.allocate)
    for exchange in opened:
        exchange.close(why)
    log.warning("--local has no effect for ranks %s, which are on one host: %s", ranks, why)
    return None


def _members(exchange: HostExchange, own: Sender, ranks: Sequence[int]) -> list[Sender]:
    """Returns the members; their incarnations are secrets, which only the host's memory carries."""
    into = [torch.zeros(INCARNATION_BYTES, dtype=torch.uint8, device="cpu") for _ in ranks]
    wired = own.incarnation.to_bytes(INCARNATION_BYTES)
    exchange.allgather(torch.frombuffer(bytearray(wired), dtype=torch.uint8), into)
    return [Sender(rank, int.from_bytes(bytes(one.numpy()))) for rank, one in zip(ranks, into, strict=True)]
