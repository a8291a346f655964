"""A model on the shards of a hub, without transports: every request is answered by the store itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hubring.ps.core.messages import Delivery, Init, Pull, Push, ReadState, Request, StateReply, Values
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import BucketSpec, HyperTable, Slice, StepHyper, TensorSpec
from hubring.ps.job.sharding import parameter_parts, plan
from hubring.ps.optim.hyperparameters import kwargs_of
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.key_state import Snapshot
from hubring.ps.store.store import KVStore
from hubring.workers.communicators.slice_exchange import of_slice
from tests.support.optimizers import hyper, random, torchs
from tests.support.store import refusal_of, sender, snapshot_of, view


class Round(NamedTuple):
    """One step of all ranks.

    Attributes:
        gradients: Each rank's, of all parameters.
        absent: The parameters of which each rank has no gradient.
        options: The optimizer's options for each parameter.
    """

    gradients: list[Tensor]
    absent: list[tuple[int, ...]]
    options: list[dict[str, Any]]

    @classmethod
    def drawn(
        cls, step: int, sizes: Sequence[int], absent: list[tuple[int, ...]], options: list[dict[str, Any]]
    ) -> Round:
        """Returns a round with random gradients; absent ones are zeros."""
        gradients = [numbers(100 * step + rank + 1, sizes) for rank in range(len(absent))]
        for gradient, positions in zip(gradients, absent, strict=True):
            for position in positions:
                gradient.split(list(sizes))[position].zero_()
        return cls(gradients, absent, options)


def numbers(seed: int, sizes: Sequence[int]) -> Tensor:
    return random(sum(sizes), seed)


def by_torch(name: str, sizes: Sequence[int], rounds: Sequence[Round]) -> list[Tensor]:
    """Steps each parameter with an optimizer of its own, from `numbers(0, sizes)`.

    torch's fused SGD fails if only some of its parameters have a momentum buffer.
    """
    own = [torch.nn.Parameter(part.clone()) for part in numbers(0, sizes).split(list(sizes))]
    optimizers = [torchs(name, [one], options) for one, options in zip(own, rounds[0].options, strict=True)]
    for given in rounds:
        mean = (sum(given.gradients, torch.zeros(())) / len(given.gradients)).split(list(sizes))
        for at, (parameter, optimizer) in enumerate(zip(own, optimizers, strict=True)):
            optimizer.param_groups[0].update(kwargs_of(hyper(name, given.options[at]), name))
            nowhere = all(at in positions for positions in given.absent)
            parameter.grad = None if nowhere else mean[at].clone()
            optimizer.step()
    return [parameter.detach() for parameter in own]


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
        self.spec = BucketSpec(0, "float32", optimizer, tensors)
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
        self, rank: int, clock: int, whole: Tensor, hyper: StepHyper, absent: tuple[int, ...] = ()
    ) -> list[Delivery]:
        deliveries = []
        for piece in self.slices:
            parts = parameter_parts(piece, self.spec.tensors)
            lacks = tuple(index for index, part in enumerate(parts) if part.position in absent)
            own = of_slice(hyper, parts) if isinstance(hyper, HyperTable) else hyper
            push = Push(sender(rank), piece.key, clock, self.part(whole, piece), own, lacks)
            deliveries += self.ask(piece, push)
        return deliveries

    def train(self, rounds: Sequence[Round], first: int = 0) -> list[Tensor]:
        """Takes steps from `first` on; returns the parameters."""
        name = self.spec.optimizer
        for step, given in enumerate(rounds[first:], first):
            table = HyperTable.of(hyper(name, options) for options in given.options)
            for rank, (gradient, absent) in enumerate(zip(given.gradients, given.absent, strict=True)):
                self.push(rank, step, gradient, table, absent)
        return list(self.values().split([tensor.numel for tensor in self.spec.tensors]))

    def assert_as_torch(self, rounds: Sequence[Round], *, bitwise: bool = True) -> None:
        """Takes all steps, and compares. The loops' vectors begin elsewhere in a parameter that is cut."""
        sizes = [tensor.numel for tensor in self.spec.tensors]
        pairs = zip(self.train(rounds), by_torch(self.spec.optimizer, sizes, rounds), strict=True)
        for at, (ours, theirs) in enumerate(pairs):
            if bitwise and at not in self.cut():
                assert torch.equal(ours, theirs), f"p{at}"
            else:
                torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)

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
        assert isinstance(reply, StateReply)
        return reply.state

    def save(self) -> Snapshot:
        """Returns a snapshot of all shards."""
        snapshot: Snapshot = {}
        for store in self.stores:
            caught = snapshot_of(store)
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
