"""The ledger tensor: any schedule of repeats, reorderings, deaths and returns.

Each push has its own slot in the parameters, and its gradient is a one in it.
Whoever was told that its push counts finds its slot changed exactly once; of a
push whose sender died unanswered it may be once or never. Never twice.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.core.messages import Code, Delivery, Init, Pull, Push, Refusal, Request, Ticket, Values
from hubring.ps.core.types import BucketSpec, Member, Sender, Slice, TensorSpec, View
from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, Consistency
from hubring.ps.store.store import KVStore
from tests.support.store import ADD

RANKS, STEPS = 3, 5
SLOTS = RANKS * STEPS


@dataclass
class Worker:
    """A client as a shard meets it: one request at a time, sent again whenever it likes."""

    sender: Sender
    first_slot: int
    clock: int | None = None
    sent: int = 0
    version: int = 0
    request: Request | None = None
    tries: set[Ticket] = field(default_factory=set)

    @property
    def slot(self) -> int:
        return self.first_slot + self.sent

    @property
    def done(self) -> bool:
        return self.sent == STEPS

    def next_request(self) -> Request:
        if self.request is None and self.clock is None:
            self.request = Pull(self.sender, 0)
        elif self.request is None:
            assert self.clock is not None
            gradient = torch.zeros(SLOTS)
            gradient[self.slot] = 1.0
            self.request = Push(self.sender, 0, self.clock, gradient, ADD)
        assert self.request is not None
        return self.request


class World:
    """One shard, its workers, and a network that repeats and reorders but loses nothing for ever."""

    def __init__(self, consistency: Consistency) -> None:
        self.store = KVStore(consistency)
        self.epoch = 0
        self.tickets = itertools.count()
        self.network: list[tuple[Request, Ticket]] = []
        self.answers: Counter[Ticket] = Counter()
        self.acknowledged: set[int] = set()
        self.applications = torch.zeros(SLOTS)
        self.workers = {rank: Worker(Sender(rank, 1), rank * STEPS) for rank in range(RANKS)}
        self.dead: dict[int, Worker] = {}
        self.show_view()
        self.store.assign(
            [Slice(0, 0, 0, SLOTS, 0)], [BucketSpec(0, "float32", "SGD", (TensorSpec("w", (SLOTS,)),))]
        )
        self.store.handle(Init(self.workers[0].sender, 0, torch.zeros(SLOTS)), "init")
        self.values = self.look()
        self.before = self.values.clone()

    def look(self) -> Tensor:
        """The very memory of the parameters."""
        ((_, reply),) = self.store.handle(Pull(self.workers[0].sender, 0), "look")
        assert isinstance(reply, Values)
        assert isinstance(reply.values, Tensor)
        return reply.values

    def send(self, rank: int) -> None:
        """The worker's next request, or the one under way once more."""
        if rank in self.workers:
            worker, ticket = self.workers[rank], next(self.tickets)
            self.network.append((worker.next_request(), ticket))
            worker.tries.add(ticket)

    def carry(self, which: int) -> None:
        """Any one message arrives."""
        if self.network:
            self.happen(lambda: self.store.handle(*self.network.pop(which % len(self.network))))

    def turn(self, rank: int) -> None:
        """A worker dies; a dead one comes back as a new life, which does not know what became of its push."""
        if rank in self.workers and len(self.workers) > 1:
            self.dead[rank] = self.workers.pop(rank)
        elif rank in self.dead and not self.dead[rank].done:
            old = self.dead.pop(rank)
            sent = old.sent + isinstance(old.request, Push)
            if sent < STEPS:
                life = Sender(rank, old.sender.incarnation + RANKS)
                self.workers[rank] = Worker(life, old.first_slot, sent=sent)
        self.happen(self.show_view)

    def show_view(self) -> list[Delivery]:
        self.epoch += 1
        members = tuple(Member(*self.workers[rank].sender) for rank in sorted(self.workers))
        return self.store.on_view(View(self.epoch, members))

    def happen(self, event: Callable[[], list[Delivery]]) -> None:
        """Lets the shard act, and checks all that it says and does."""
        deliveries = event()
        self.applications += self.values != self.before
        self.before = self.values.clone()
        for ticket, reply in deliveries:
            self.answers[ticket] += 1
            worker = next((each for each in self.workers.values() if ticket in each.tries), None)
            if isinstance(reply, Refusal):
                assert reply.code is Code.FENCED
                assert worker is None
            elif worker is not None:
                assert isinstance(reply, Values)
                self.take(worker, reply)

    def take(self, worker: Worker, values: Values) -> None:
        assert values.version >= worker.version
        worker.version, worker.clock = values.version, values.clock
        if isinstance(worker.request, Push):
            self.acknowledged.add(worker.slot)
            worker.sent += 1
        worker.request = None
        worker.tries = set()
        if worker.done:
            rank = worker.sender.rank
            self.dead[rank] = self.workers.pop(rank)
            self.happen(self.show_view)

    def finish(self, dice: random.Random) -> None:
        """Everybody comes back, and the network carries everything in the end."""
        for rank in list(self.dead):
            self.turn(rank)
        for _ in range(100 * SLOTS):
            self.send(dice.randrange(RANKS))
            self.carry(dice.randrange(1000))
            self.carry(dice.randrange(1000))
        while self.network:
            self.carry(0)


class Hosts(World):
    """Ranks 0 and 1 are on one host: one of them pushes the sum of both, and passes the answer on.

    Once they are apart, or one dies, each pushes its own gradients, until they meet again. It does not know
    what becomes of the sums under way.
    """

    def __init__(self) -> None:
        self.together = True
        super().__init__(BSP())

    def send(self, rank: int) -> None:
        pair = [self.workers[each] for each in range(2) if each in self.workers]
        if rank == 2 or not self.together or len(pair) < 2 or self.workers[rank].clock is None:
            super().send(rank)
            return
        if any(worker.clock is None for worker in pair):
            return
        leading, covered = pair if pair[0].sent % 2 else pair[::-1]
        if leading.request is None and covered.request is None:
            whole, own = leading.next_request(), covered.next_request()
            assert isinstance(whole, Push)
            assert isinstance(own, Push)
            gradient = torch.stack([self.plain(whole), self.plain(own)]).sum(0)
            leading.request = replace(whole, gradient=gradient, covers=(covered.sender,))
        if rank == leading.sender.rank:
            super().send(rank)

    def meet(self) -> None:
        pair = [self.workers[each] for each in range(2) if each in self.workers]
        self.together = self.together or (len(pair) == 2 and not any(worker.request for worker in pair))

    def happen(self, event: Callable[[], list[Delivery]]) -> None:
        before = self.before
        super().happen(event)
        changes = (self.before - before)[self.before != before]
        assert torch.allclose(changes * len(changes), torch.ones(())), "no mean of different gradients"

    @staticmethod
    def plain(push: Push) -> Tensor:
        assert isinstance(push.gradient, Tensor)
        return push.gradient

    def turn(self, rank: int) -> None:
        self.together = self.together and rank == 2
        super().turn(rank)

    def take(self, worker: Worker, values: Values) -> None:
        covered = worker.request.covers if isinstance(worker.request, Push) else ()
        super().take(worker, values)
        for sender in covered if self.together else ():
            super().take(self.workers[sender.rank], values)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([BSP(), ASP(), SSP(0), SSP(2), BackupWorkers(1)]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=120),
    st.integers(0, 2**32),
)
def test_each_acknowledged_push_counts_once_and_every_request_is_answered_once(
    consistency: Consistency, script: list[tuple[int, int]], seed: int
) -> None:
    world = World(consistency)
    for action, argument in script:
        if action < 4:
            world.send(argument % RANKS)
        elif action < 9:
            world.carry(argument)
        else:
            world.turn(argument % RANKS)
    world.finish(random.Random(seed))

    assert not world.workers, "somebody waits for ever"
    assert world.answers == Counter(range(next(world.tickets)))
    assert world.applications.max() <= 1
    acknowledged = world.applications[sorted(world.acknowledged)]
    if consistency.backup:
        # Some were acknowledged as dropped.
        assert (acknowledged == 0).sum() <= world.store.stats().dropped + world.store.stats().duplicates
    else:
        assert acknowledged.min() == 1
    if not consistency.lockstep:
        assert set(world.values.tolist()) <= {0.0, 1.0}


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32))
def test_each_gradient_counts_once_whatever_becomes_of_the_sums_on_a_host(seed: int) -> None:
    world, dice = Hosts(), random.Random(seed)
    for _ in range(dice.randrange(200)):
        action, argument = dice.choice("sssssccccctam"), dice.randrange(1000)
        if action == "s":
            world.send(argument % RANKS)
        elif action == "c":
            world.carry(argument)
        elif action == "t":
            world.turn(argument % RANKS)
        elif action == "a":
            world.together = False
        else:
            world.meet()
    world.finish(dice)

    assert not world.workers, "somebody waits for ever"
    assert world.answers == Counter(range(next(world.tickets)))
    assert world.applications.max() <= 1
    assert world.applications[sorted(world.acknowledged)].min() == 1
