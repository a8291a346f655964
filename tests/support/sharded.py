"""A model on the shards of a hub, without transports: every request is answered by the store itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hubring.ps.core.messages import Delivery, Init, Pull, Push, ReadState, Request, State, Values
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import BucketSpec, Hyper, Slice, TensorSpec
from hubring.ps.job.sharding import plan
from hubring.ps.job.slice_parameters import parameter_parts
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.snapshot import Snapshot
from hubring.ps.store.store import KVStore
from tests.support.store import refusal_of, sender, view


class ShardedModel:
    """One bucket of parameters in slices on several shards.

    Args:
        sizes: The elements of each parameter.
        optimizer: The hub's optimizer.
        consistency: The mode.
        workers: The ranks.
        shards: The number of shards.
        slice_bytes: The most bytes of a slice.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        optimizer: str,
        consistency: Consistency,
        workers: int = 2,
        shards: int = 2,
        slice_bytes: int = 4096,
    ) -> None:
        tensors = tuple(TensorSpec(f"p{at}", (size,)) for at, size in enumerate(sizes))
        self.spec = BucketSpec(0, "float32", 0, optimizer, tensors)
        self.slices = plan([self.spec], shards, slice_bytes).slices
        self.stores = [KVStore(consistency) for _ in range(shards)]
        self.workers = workers
        for shard, store in enumerate(self.stores):
            store.on_view(view(1, *map(sender, range(workers))))
            store.assign([piece for piece in self.slices if piece.shard == shard], [self.spec])

    def ask(self, piece: Slice, request: Request) -> list[Delivery]:
        return self.stores[piece.shard].handle(request, (piece.key, request.sender.rank))

    def init(self, whole: Tensor, state: Callable[[Slice], OptimizerState] | None = None) -> None:
        for piece in self.slices:
            given = state(piece) if state else None
            self.ask(piece, Init(sender(0), piece.key, self.part(whole, piece), given))

    def push(
        self, rank: int, clock: int, whole: Tensor, hyper: Hyper, absent: tuple[int, ...] = ()
    ) -> list[Delivery]:
        deliveries = []
        for piece in self.slices:
            parts = parameter_parts(piece, self.spec.tensors)
            lacks = tuple(index for index, part in enumerate(parts) if part.position in absent)
            push = Push(sender(rank), piece.key, clock, self.part(whole, piece), hyper, lacks)
            deliveries += self.ask(piece, push)
        return deliveries

    def values(self) -> Tensor:
        """Returns a copy of all parameters."""
        whole = torch.empty(self.spec.numel)
        for piece in self.slices:
            ((_, reply),) = self.ask(piece, Pull(sender(0), piece.key))
            assert isinstance(reply, Values)
            assert isinstance(reply.values, Tensor)
            self.part(whole, piece).copy_(reply.values)
        return whole

    def state(self, piece: Slice, rank: int = 0) -> OptimizerState:
        """Returns the optimizer's state of a slice."""
        ((_, reply),) = self.ask(piece, ReadState(sender(rank), piece.key))
        assert isinstance(reply, State)
        return reply.state

    def save(self) -> Snapshot:
        """Returns a snapshot of all shards."""
        snapshot: Snapshot = {}
        for store in self.stores:
            assert store.capture_at(None)
            caught = store.captured()
            assert caught is not None
            snapshot.update(caught)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        for store in self.stores:
            store.restore(snapshot)

    def cut(self) -> set[int]:
        """Returns the positions of the parameters that lie in several slices."""
        positions = [
            part.position for piece in self.slices for part in parameter_parts(piece, self.spec.tensors)
        ]
        return {position for position in positions if positions.count(position) > 1}

    @staticmethod
    def part(whole: Tensor, piece: Slice) -> Tensor:
        return whole[piece.offset : piece.offset + piece.numel]


def refused(deliveries: list[Delivery]) -> str:
    """Returns the text of the only reply, a refusal."""
    return refusal_of(deliveries).text
