"""A primary's store and its standby's in one process, with workers that outlive the primary."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hubring.ps.core.messages import (
    Change,
    ClosedRound,
    Coded,
    CoordinatorCall,
    Delivery,
    Forwarded,
    Init,
    Pull,
    Push,
    Refusal,
    Request,
    Ticket,
    Transfer,
    Values,
)
from hubring.ps.core.types import BucketSpec, Member, Sender, Slice, StepHyper, View
from hubring.ps.shard.standby_stream import lasting
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.store import KVStore
from hubring.ps.transport.decode import decode_request
from hubring.ps.transport.encode import encode_change
from tests.support.store import snapshot_of

Gradient = Callable[[int, int, int], Tensor | Coded]
"""Returns the gradient of a rank's push with this clock on this key."""


class Recorder:
    """A replica that keeps each change as the bytes that a stream would carry."""

    def __init__(self) -> None:
        self.sent: list[Callable[[KVStore], object]] = []

    def allocate(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def append(self, change: Change) -> None:
        message = encode_change(change, len(self.sent), b"secret")
        if message.payload is not None:
            message.payload = memoryview(bytearray(message.payload))
        number, forwarded = decode_request(message)
        assert isinstance(forwarded, Forwarded)
        assert (number, forwarded.stream) == (len(self.sent), b"secret")
        self.sent.append(lambda store: apply(store, forwarded.change))


def apply(store: KVStore, change: Change) -> None:
    """Applies a change as a standby's loop does."""
    assert not isinstance(change, CoordinatorCall), "the pair makes these calls itself"
    if isinstance(change, ClosedRound | Transfer):
        store.apply(change)
    else:
        store.handle(change, None)


@dataclass
class Worker:
    """One worker with one request under way per key."""

    sender: Sender
    steps: int
    clocks: dict[int, int] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    pushed: dict[int, int] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class Pair:
    """Two stores, a network that repeats and reorders, and a cut after which only the standby is left.

    Args:
        consistency: The mode.
        workers: Their number.
        steps: How many pushes each worker makes on each key.
        slices: The keys.
        bucket: Their bucket.
        gradient: The pushes' gradients.
        hyper: The pushes' hyperparameters.
    """

    def __init__(
        self,
        consistency: Consistency,
        workers: int,
        steps: int,
        slices: Sequence[Slice],
        bucket: BucketSpec,
        gradient: Gradient,
        hyper: StepHyper,
    ) -> None:
        self.primary, self.standby = KVStore(consistency), KVStore(consistency)
        self.recorder = Recorder()
        self.primary.replicate(self.recorder)
        self.keys = [piece.key for piece in slices]
        self.workers = [Worker(Sender(rank, rank + 1), steps) for rank in range(workers)]
        self._applied = 0
        self._held: deque[tuple[int, list[Delivery]]] = deque()
        self._network: list[tuple[Request, tuple[int, int]]] = []
        self._gradient, self._hyper = gradient, hyper
        self._serving = self.primary
        self._consistency = consistency
        self._calls: list[Callable[[KVStore], object]] = []
        self._epoch = 0
        self.show_view()
        self.change(lambda store: store.assign(slices, [bucket]))
        if bucket.optimizer:
            for piece in slices:
                zeros = torch.zeros(piece.numel, dtype=getattr(torch, bucket.dtype))
                self.happen(Init(self.workers[0].sender, piece.key, zeros), None)
        self.follow(len(self.recorder.sent))

    def change(self, call: Callable[[KVStore], object]) -> None:
        """Makes a call of the coordinator, which waits until the standby has the change too."""
        self._calls.append(call)
        if self._serving is self.primary:
            self.recorder.sent.append(call)
        deliveries = call(self._serving)
        self.hold(deliveries if isinstance(deliveries, list) else [])
        self.follow(len(self.recorder.sent))

    def show_view(self) -> None:
        self._epoch += 1
        live = [worker for worker in self.workers if self.unfinished(worker)]
        view = View(self._epoch, tuple(Member(*worker.sender) for worker in live))
        self.change(lambda store: store.on_view(view))

    def unfinished(self, worker: Worker) -> bool:
        return any(worker.pushed.get(key, 0) < worker.steps for key in self.keys)

    def send(self, rank: int, key: int) -> None:
        """A worker sends its next request, or the one under way once more."""
        worker = self.workers[rank]
        if key not in worker.requests:
            if worker.pushed.get(key, 0) == worker.steps:
                return
            if key in worker.clocks:
                gradient = self._gradient(rank, worker.pushed.get(key, 0), key)
                push = Push(worker.sender, key, worker.clocks[key], gradient, self._hyper)
                worker.requests[key] = push
            else:
                worker.requests[key] = Pull(worker.sender, key)
        self._network.append((worker.requests[key], (rank, key)))

    def carry(self, which: int) -> None:
        """Any one message arrives."""
        if self._network:
            self.happen(*self._network.pop(which % len(self._network)))

    def happen(self, request: Request, ticket: Ticket) -> None:
        self.hold(self._serving.handle(request, ticket))

    def hold(self, deliveries: list[Delivery]) -> None:
        """A primary's replies wait until the standby has all changes so far."""
        kept = [Delivery(ticket, lasting(reply)) for ticket, reply in deliveries]
        self._held.append((len(self.recorder.sent), kept))
        if self._serving is self.standby:
            self._release()

    def follow(self, count: int) -> None:
        """The standby applies the next changes, and the primary's replies leave."""
        for call in self.recorder.sent[self._applied : self._applied + count]:
            self._applied += 1
            call(self.standby)
        self._release()

    def _release(self) -> None:
        while self._held and (self._serving is self.standby or self._held[0][0] <= self._applied):
            for ticket, reply in self._held.popleft()[1]:
                if isinstance(ticket, tuple):
                    rank, key = ticket
                    self._take(rank, key, reply)

    def _take(self, rank: int, key: int, reply: object) -> None:
        worker = self.workers[rank]
        assert not isinstance(reply, Refusal), reply
        assert isinstance(reply, Values)
        request = worker.requests.get(key)
        if request is None or (isinstance(request, Push) and reply.clock <= request.clock):
            return  # the second reply to a request that was sent twice
        del worker.requests[key]
        worker.clocks[key] = reply.clock
        if isinstance(reply.values, Tensor):
            worker.values[key] = reply.values.clone()
        if isinstance(request, Push):
            worker.pushed[key] = worker.pushed.get(key, 0) + 1
            if not self.unfinished(worker):
                self.show_view()

    def succeed(self) -> None:
        """The primary gets a new standby in the middle of the job."""
        self.follow(len(self.recorder.sent))
        self.recorder, self._applied = Recorder(), 0
        self.standby = KVStore(self._consistency)
        for call in self._calls:
            call(self.standby)
        for change in self.primary.transfer():
            self.recorder.append(change)
        self.primary.replicate(self.recorder)
        self.follow(len(self.recorder.sent))  # it is no standby before

    def cut(self) -> None:
        """The primary is gone, with its held replies and all messages under way. The standby is promoted."""
        self._held.clear()
        self._network.clear()
        del self.recorder.sent[self._applied :]
        self._serving = self.standby

    def finish(self) -> None:
        """All workers end their steps."""
        while any(map(self.unfinished, self.workers)):
            before = [(dict(worker.pushed), dict(worker.clocks)) for worker in self.workers]
            for worker, key in itertools.product(self.workers, self.keys):
                self.send(worker.sender.rank, key)
            while self._network:
                self.carry(0)
            self.follow(len(self.recorder.sent))
            after = [(dict(worker.pushed), dict(worker.clocks)) for worker in self.workers]
            assert before != after, "somebody waits forever"

    def parameters(self, key: int) -> Tensor:
        """Returns the values that the store holds."""
        snapshot = snapshot_of(self._serving)
        return snapshot[key].values
