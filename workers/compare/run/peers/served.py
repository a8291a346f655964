"""Peers that exchange after backward: `mpi`, and the parameter servers `rpc` and `ray`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hubring.ps.core.errors import HubringError, UsageError
from hubring.ps.core.types import HyperTable, Slice, StepHyper
from hubring.ps.core.work import Work
from hubring.ps.job.sharding import ParameterPart, parameter_parts
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import ParameterState, SteppingHub
from hubring.workers.communicators.slice_exchange import of_slice
from hubring.workers.compare.run.peers.peer import PeerCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.peers import ray, rpc
from hubring.workers.peers.rendezvous import MpiWorld, PeerRendezvous


class AfterBackward(DistributedOptimizer):
    """Exchanges after backward, without overlap, as scripts do that exchange by hand.

    Options for more overlap are ignored; they do not change the result.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__(optimizer, model, **{**options, "overlap": False, "cross_barrier": False})


class Mpi(PeerCommunicator):
    """Reduces buckets in place, one after another."""

    topology = "mpi"
    bytes_are = "computed"
    sums_presence = True
    optimizer = AfterBackward

    def __init__(self, seat: PeerRendezvous) -> None:
        super().__init__(seat)
        self._world = MpiWorld(seat)

    def gather(self, value: Any) -> list[Any]:
        return self._world.gather(value)

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        self._world.sum(bucket.memory)
        bucket.memory.div_(self.size)
        self.count_passes(2, bucket.memory.nbytes)
        return Work(f"the exchange of bucket {bucket.spec.index}", 0)

    def close(self, *, finished: bool) -> None:
        """Does nothing: see `World`."""


log = logging.getLogger(__name__)

ServedSlice = tuple[int, Tensor, Tensor]
"""Number, gradients, and the buffer for the answer; both tensors are in the bucket's memory."""


class Served(PeerCommunicator, SteppingHub):
    """A worker of a parameter server.

    Attributes:
        client: Connects it to the servers.
        slice_bytes: Size of a slice; None: a whole bucket.
    """

    bytes_are = "counted"
    optimizer = AfterBackward
    client: ClassVar[type[rpc.RpcClient | ray.RayClient]]
    slice_bytes: ClassVar[int | None] = None

    def __init__(self, seat: PeerRendezvous) -> None:
        super().__init__(seat)
        self.steps_on = "worker" if seat.aggregate else "server"
        self.stepping_hub = None if seat.aggregate else self
        self._slices: dict[int, list[ServedSlice]] = {}
        self._parts: dict[int, tuple[ParameterPart, ...]] = {}
        """The parameters of each slice, by its number."""
        self._client = self.client(seat)

    def gather(self, value: Any) -> list[Any]:
        return self._client.gather(value)

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        start = super().attach(buckets)
        self.write_state(buckets, state or {})
        for bucket in buckets:
            self._slices[bucket.spec.index] = self._cut(bucket)
        self.gather(None)  # waits until the servers hold all parameters
        return start

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        if self.steps_on == "worker":  # the server reports no absent gradients: they are zeros
            bucket.absent = frozenset()
        answers = []
        for one in self._slices[bucket.spec.index]:
            own = of_slice(hyper, self._parts[one[0]]) if isinstance(hyper, HyperTable) else hyper
            answers.append(self._client.push_pull(*one, own))
        self.traffic.bytes_sent += bucket.gradients.nbytes

        def fetch(work: Work, timeout: float | None) -> None:
            """Takes the answers in the thread that waits, with the peer's own timeout."""
            try:
                for answer in answers:
                    answer()
            except Exception as error:  # peers' libraries raise many types
                work.fail(HubringError(f"{work.what} failed: {error}"))
            else:
                self.traffic.bytes_received += bucket.gradients.nbytes
                work.complete_part()

        return Work(f"the exchange of bucket {bucket.spec.index}", attend=fetch)

    def read_state(self, buckets: Sequence[Bucket]) -> dict[str, dict[str, Tensor]]:
        return {}  # these servers cannot be asked for it

    def write_state(self, buckets: Sequence[Bucket], states: Mapping[str, ParameterState]) -> None:
        if states:
            log.warning("%s: the servers' optimizer keeps its own state, not the loaded one", self.topology)

    def pull(self, bucket: Bucket) -> Work:
        return Work(f"the pull of bucket {bucket.spec.index}", 0)  # the answer to a push brought the newest

    def write_parameters(self, bucket: Bucket, positions: Collection[int]) -> None:
        raise UsageError(
            f"{self.topology}: the script changed parameters between two steps, which these servers cannot"
            " take; leave the row out, or let the workers step with --aggregate"
        )

    def keep_parameters(self) -> None:
        """These servers share no memory."""

    def gradients_moved(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            held = self._slices[bucket.spec.index]
            parts = torch.split(bucket.gradients, self._numel(bucket))
            self._slices[bucket.spec.index] = [
                (number, rpc.own(part), part if self.steps_on == "worker" else target)
                for (number, _, target), part in zip(held, parts, strict=True)
            ]

    def close(self, *, finished: bool) -> None:
        if finished:  # else it could wait forever
            self._client.leave()

    def _numel(self, bucket: Bucket) -> int:
        return (self.slice_bytes or bucket.gradients.nbytes) // bucket.gradients.element_size()

    def _cut(self, bucket: Bucket) -> list[ServedSlice]:
        numel = self._numel(bucket)
        pairs = zip(torch.split(bucket.gradients, numel), torch.split(bucket.values, numel), strict=True)
        slices: list[ServedSlice] = []
        offset = 0
        for number, (gradients, values) in enumerate(pairs, start=sum(map(len, self._slices.values()))):
            piece = Slice(number, bucket.spec.index, offset, values.numel(), 0)
            parts = self._parts[number] = parameter_parts(piece, bucket.spec.tensors)
            offset += values.numel()
            if self.rank == 0:
                self._client.hold(number, values, bucket.spec.optimizer, [part.in_slice for part in parts])
            target = values if self.steps_on == "server" else gradients
            slices.append((number, rpc.own(gradients), target))
        return slices


class Rpc(Served):
    """A worker of the parameter server on torch.distributed.rpc."""

    topology = "rpc"
    client = rpc.RpcClient
    slice_bytes = rpc.SLICE_BYTES


class Ray(Served):
    """A worker of Ray's actor."""

    topology = "ray"
    client = ray.RayClient
