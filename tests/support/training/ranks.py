"""Connected ranks: one class for each communicator and each location of the buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import ClassVar, TypeVar, cast
from unittest.mock import patch

import torch

from hubring.ps.client.client import KVClient
from hubring.ps.client.session import Assignment, Session
from hubring.ps.compression import gpu_tensor
from hubring.ps.core.errors import HubringError
from hubring.ps.core.types import BucketSpec, Member, Sender, ShardPlan, Slice, Slicing, View
from hubring.ps.job.sharding import plan
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP, Consistency
from hubring.ps.store.parameter_memory import GpuMemory, HostMemory, ParameterMemory
from hubring.ps.transport.base import Connection, Transport
from hubring.ps.transport.registry import ShardAddress
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.zmq.transport import ZmqTransport
from hubring.workers.buckets.staging import Device, DeviceWaiter, Staging, ThroughHost
from hubring.workers.communicators import gpu_sharing
from hubring.workers.communicators.base import Communicator, SteppingHub
from hubring.workers.communicators.hub import PSCommunicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.group import RingStore
from tests.support.fakes.gpu import GPU, FakeMemory
from tests.support.fakes.lazy_device import PromptDevice
from tests.support.training.notes import SharedNotes

T = TypeVar("T")
LIMIT = 60.0
"""Seconds after which a waiting rank is a bug."""


class Ranks:
    """All ranks of one kind of communicator, each on its own thread."""

    size: ClassVar[int]

    def join(self, rank: int) -> Communicator:
        """Called on each rank's thread."""
        raise NotImplementedError

    def run(self, action: Callable[[Communicator], T]) -> list[T]:
        """Returns the results in rank order; raises the error of the lowest failed rank."""

        def live(rank: int) -> T:
            communicator = self.join(rank)
            try:
                result = action(communicator)
            except BaseException:
                communicator.close(finished=False)
                raise
            communicator.close(finished=True)
            return result

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(live, rank) for rank in range(self.size)]
            return [future.result(LIMIT) for future in futures]

    @classmethod
    def run_once(cls, action: Callable[[Communicator], T]) -> list[T]:
        """Runs on new ranks, which are closed then."""
        ranks = cls()
        try:
            return ranks.run(action)
        finally:
            ranks.close()

    def close(self) -> None:
        """Ends the ranks' rendezvous."""


class LocalRanks(Ranks):
    size = 1

    def join(self, rank: int) -> Communicator:
        return LocalCommunicator()


class RingRanks(Ranks):
    """Ranks of a ring; they are on one host, so that it uses shared memory."""

    size = 3
    compress: ClassVar[str] = ""
    backend: ClassVar[str | None] = None
    hosts: ClassVar[str] = ""
    """A letter for each rank's host, if the ranks of one host exchange among themselves first."""

    def __init__(self) -> None:
        self.store = RingStore(SharedNotes(), "ring", LIMIT)

    def join(self, rank: int) -> Communicator:
        communicator = AllreduceCommunicator(
            rank,
            self.size,
            self.store,
            host="127.0.0.1",
            backend=self.backend,
            timeout=LIMIT,
            compress=self.compress,
            local=self.hosts[rank : rank + 1],
        )
        communicator.connect()
        assert communicator.backend == (self.backend or "shm")
        return communicator


class GlooRingRanks(RingRanks):
    backend = "gloo"


class TwoLevelRingRanks(GlooRingRanks):
    hosts = "AAB"


class Seat:
    """The part of a session that PSCommunicator uses, without a coordinator."""

    def __init__(self, hub: HubRanks, rank: int, late: bool = False) -> None:
        self.sender = Sender(rank, rank + 1)
        self.size = hub.size
        self.late = late
        self.lockstep = hub.consistency().lockstep
        self.mode = "bsp"
        self.saves = False
        self.shards = [ShardAddress("here", hub.addresses) for _ in hub.loops]
        self._hub = hub

    def plan(
        self, buckets: Sequence[BucketSpec], slicing: Slicing | None = None, *, trial: int = 0
    ) -> Assignment:
        return Assignment(self._hub.agree(buckets), step=0, initialised=False)

    def on_failure(self, callback: Callable[[HubringError], None]) -> None:
        """Does nothing, since no worker fails here."""


def of_shard(held: ShardPlan, shard: int) -> list[Slice]:
    return [piece for piece in held.slices if piece.shard == shard]


def _see(loop: ShardLoop, view: View) -> None:
    loop.send(loop.store.on_view(view))


class HubRanks(Ranks):
    """Ranks of a hub whose two shards are threads of this process; usable for one `run`."""

    size = 3
    aggregate: ClassVar[bool] = False
    compress: ClassVar[str] = ""
    slice_bytes: ClassVar[int] = 16
    wire: type[Transport] = ShmTransport

    def __init__(self) -> None:
        self.transport = self.wire()
        self.wired: Collection[int] = range(self.size)
        """Ranks that do not share memory with all shards."""
        self.listeners = [self.transport.listen("127.0.0.1") for _ in range(2)]
        self.addresses: dict[str, str] = {}
        self.loops = [
            ShardLoop(self.consistency(), [listener], self.parameter_memory()) for listener in self.listeners
        ]
        self.threads = [threading.Thread(target=loop.run) for loop in self.loops]
        self.lock = threading.Lock()
        self.shared: ShardPlan | None = None
        self.averages = False
        for thread in self.threads:
            thread.start()
        self.epochs = count(1)
        self.see(*range(self.size))

    def see(self, *ranks: int, **incarnations: int) -> None:
        """Sets the job's workers; `incarnations` are those of ranks that have another one, as `r1=9`."""
        members = tuple(Member(rank, incarnations.get(f"r{rank}", rank + 1)) for rank in ranks)
        view = View(next(self.epochs), members)
        for loop in self.loops:
            loop.command(partial(_see, loop, view)).result(LIMIT)

    def consistency(self) -> Consistency:
        return BSP()

    def parameter_memory(self) -> ParameterMemory:
        return HostMemory()

    def agree(self, buckets: Sequence[BucketSpec]) -> ShardPlan:
        with self.lock:
            averages = not buckets[0].optimizer
            if self.shared is None or averages != self.averages:
                self.averages = averages
                self.shared = plan(buckets, len(self.loops), self.slice_bytes)
                for shard, loop in enumerate(self.loops):
                    mine = of_shard(self.shared, shard)
                    loop.command(partial(loop.store.assign, mine, buckets)).result(LIMIT)
            elif buckets[0].index > max(piece.bucket for piece in self.shared.slices):
                self.extend(buckets)
            return self.shared

    def extend(self, buckets: Sequence[BucketSpec]) -> None:
        """Adds buckets, as the coordinator does."""
        assert self.shared is not None
        first = len(self.shared.slices)
        more = plan(buckets, len(self.loops), self.slice_bytes, first=first)
        version = max(loop.command(loop.store.stats).result(LIMIT).newest for loop in self.loops)
        for shard, loop in enumerate(self.loops):
            loop.command(partial(loop.store.extend, of_shard(more, shard), buckets, version)).result(LIMIT)
        self.shared = ShardPlan((*self.shared.slices, *more.slices))

    def host_of(self, rank: int) -> str:
        """The host on which a rank adds its gradients with others; empty: it pushes its own."""
        return ""

    def join(self, rank: int) -> Communicator:
        return self.seated(Seat(self, rank))

    def seated(self, seat: Seat) -> PSCommunicator:
        def dial(shard: int) -> Connection:
            return self.transport.dial(self.listeners[shard].address, LIMIT)

        client = KVClient(seat.sender, len(self.loops), dial)
        return PSCommunicator(
            cast(Session, seat),
            client,
            self.transport,
            wired=seat.sender.rank in self.wired,
            aggregate=self.aggregate,
            timeout=LIMIT,
            compress=self.compress,
            host=self.host_of(seat.sender.rank),
        )

    def close(self) -> None:
        for thread, loop in zip(self.threads, self.loops, strict=True):
            loop.stop()
            thread.join(LIMIT)
            assert not thread.is_alive()


class AggregatingRanks(HubRanks):
    aggregate = True


class TwoLevelRanks(HubRanks):
    """Ranks on two hosts: some of one host add their gradients there."""

    wire = ZmqTransport
    hosts: ClassVar[str] = "aab"

    def host_of(self, rank: int) -> str:
        return self.hosts[rank]


def _zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


class StagedRanks(HubRanks):
    """Ranks whose buckets are on a lazy device, which copies only when a thread waits."""

    device: ClassVar[type[Device]] = PromptDevice

    def __init__(self) -> None:
        self.waiter = DeviceWaiter()
        self.patch = patch.object(Staging, "stage", lambda _, *given: self.stage(*given))
        self.patch.start()
        super().__init__()

    def stage(self, gradients: torch.Tensor, values: torch.Tensor) -> ThroughHost:
        return ThroughHost(gradients, values, self.device(), self.waiter, _zeros)

    def close(self) -> None:
        super().close()
        self.patch.stop()
        self.waiter.end()


class StagedAggregatingRanks(StagedRanks):
    aggregate = True


class PlacedRanks(StagedRanks):
    """Ranks whose buckets are on the same device as the store."""

    def __init__(self) -> None:
        self.memory = FakeMemory()
        self.token = torch.arange(16, dtype=torch.uint8)
        self.own_gpu = patch.object(gpu_sharing, "own_gpu", lambda _: (GPU, self.memory))
        self.own_gpu.start()
        super().__init__()
        self.addresses[gpu_tensor.ADDRESS] = gpu_tensor.invitation(GPU, self.memory, self.token)

    def parameter_memory(self) -> ParameterMemory:
        return GpuMemory(torch.device("cpu"), self.memory)

    def close(self) -> None:
        super().close()
        self.own_gpu.stop()


class PlacedAggregatingRanks(PlacedRanks):
    aggregate = True


def hub_of(communicator: Communicator) -> SteppingHub:
    """Returns the hub that steps for a rank."""
    hub = communicator.stepping_hub
    assert hub is not None
    return hub
