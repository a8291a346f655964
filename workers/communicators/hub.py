"""The hub's communicator: splits buckets into slices and sends each slice to its shard."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from hubring.ps.client.assignment import Assignment
from hubring.ps.client.client import KVClient
from hubring.ps.client.session import Session
from hubring.ps.core.codecs import CodecSpec, parse
from hubring.ps.core.errors import ConfigError, DeadlineExceeded
from hubring.ps.core.messages import Call, Collective, Contribute
from hubring.ps.core.types import BucketSpec, Hyper, Slicing
from hubring.ps.core.work import Work
from hubring.ps.job.sharding import SLICE_BYTES
from hubring.ps.store.gpu_tensor import Reached
from hubring.ps.transport.base import Transport
from hubring.workers.buckets.absence import Absence
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.staging import Lands
from hubring.workers.buckets.value_memory import ComparedValues, ValueMemory
from hubring.workers.buckets.window_values import WindowValues
from hubring.workers.communicators.base import (
    AppliedPush,
    CollectiveWork,
    Communicator,
    ParameterState,
    PushRecord,
    Start,
)
from hubring.workers.communicators.call_ids import CallIds
from hubring.workers.communicators.gpu_sharing import PlacedBucket, shared_memory
from hubring.workers.communicators.hub_state import HubState, state_of_slice
from hubring.workers.communicators.powersgd import LowRankMean
from hubring.workers.communicators.slice_exchange import SliceExchange, exchange_name, start_mean
from hubring.workers.communicators.slice_tuning import SliceTrial

log = logging.getLogger(__name__)


class PSCommunicator(Communicator):
    """Exchanges through the parameter server.

    Args:
        session: This worker's session. `close` does not close it.
        client: Connections to the shards. `close` closes it.
        transport: Allocates the memory of the buckets.
        wired: Whether some shard is reached over the network, not through shared memory.
        aggregate: Whether the hub only averages and the worker's own optimizer steps.
        timeout: Seconds that one exchange may take.
        compress: Codec of the gradients, as in `hubring.ps.core.codecs`; empty: no compression.
    """

    topology = "hub"
    drains = True

    def __init__(
        self,
        session: Session,
        client: KVClient,
        transport: Transport,
        *,
        wired: bool,
        aggregate: bool,
        timeout: float,
        compress: str = "",
    ) -> None:
        self.rank = session.sender.rank
        self.size = session.size
        self.late = session.late
        self.lockstep = session.lockstep
        self.timeout: float = timeout
        self.steps_on: Literal["server", "worker"] = "worker" if aggregate else "server"
        self.traffic = client.traffic
        self._session = session
        self._client = client
        self._transport = transport
        self._wired = wired
        self._exchange = SliceExchange(client, means=aggregate)
        self._pushes: HubPushes | None = None
        self._compress = compress
        self._low_rank: dict[int, LowRankMean] = {}
        """By bucket index, with PowerSGD."""
        self._placed: dict[int, PlacedBucket] = {}
        """By bucket index, if the hub's store is on the model's GPU."""
        self._rounds: WeakKeyDictionary[Bucket, str] = WeakKeyDictionary()
        """Collective names of buckets without slices: those of a second or later optimizer."""
        self._numbers = count(1)
        self._call_ids = [CallIds() for _ in session.shards]
        self._calling = threading.Lock()
        self._state = HubState(client, self._exchange.slices, timeout)
        session.on_failure(client.fail)

    @property
    def draining(self) -> bool:  # type: ignore[override]
        return self._client.draining

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return _tensor(self._transport.allocate, numel, dtype)

    def allocate_values(self, numel: int, dtype: torch.dtype, device: torch.device) -> ValueMemory:
        if self.steps_on == "worker" or numel == 0:
            return super().allocate_values(numel, dtype, device)
        if device.type != "cpu":
            return ComparedValues(numel, dtype, device)
        return WindowValues(self._transport.window(numel * dtype.itemsize), dtype)

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> Start:
        self._check_attachable(buckets)
        if self._exchange.slices and self.steps_on == "worker":
            return self._attach_rounds(buckets)
        extends = bool(self._exchange.slices)
        specs = self._specs(buckets)
        assigned = self._agree(specs)
        for spec in specs:
            self._exchange.add(spec, assigned.plan.of_bucket(spec.index))
        if not self._low_rank:
            self._exchange.compress(buckets, self._compress, self.allocate)
        if self.steps_on == "server":
            self._bring_parameters(buckets, assigned, state or {})
        else:
            self._learn_clocks(buckets)
            self._broadcast_parameters(buckets)
        self._place(buckets)
        if extends or (self.lockstep and not self.late):
            return Start(assigned.step)
        # Of a running job the coordinator only knows the step of the last heartbeats. In asynchronous modes a
        # resumed worker continues at a step of its own.
        completed = self._client.completed if self.late else self._client.resume()
        return Start(max(assigned.step, completed))

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        """As `Communicator.push_pull`; `bucket.absent` are the parameters without a gradient on this rank.

        A hub that steps leaves the parameters that are absent on every rank unchanged. Where the workers
        step, `bucket.absent` has only these parameters once the work is done.
        """
        what = exchange_name(bucket.spec.index)
        name = self._rounds.get(bucket)
        if name is not None:
            return bucket.stage.push_pull(what, lambda: start_mean(self, name, bucket), self._lands)
        absent = Absence(bucket, reports=self.steps_on == "worker")
        placed = self._placed.get(bucket.spec.index)
        if placed is not None:
            return placed.push_pull(what, self._client, hyper, absent)
        return bucket.stage.push_pull(what, lambda: self._start(bucket, hyper, absent), self._lands)

    def _start(self, bucket: Bucket, hyper: Hyper, absent: Absence) -> Work:
        """Starts the exchange of gradients in host memory."""
        index = bucket.spec.index
        low_rank = self._low_rank.get(index)
        if low_rank is not None:
            phases = low_rank.phases
            first = 2 * index  # only its slices have every parameter of the bucket
            return low_rank.exchange(
                bucket.host_gradients,
                lambda n: self._exchange.push_pull(
                    first + n, phases[n], phases[n], hyper, None if n else absent
                ),
                lambda: bucket.absent,
            )
        into = bucket.host_values if self.steps_on == "server" else bucket.host_gradients
        return self._exchange.push_pull(index, bucket.host_gradients, into, hyper, absent)

    def write_parameters(self, bucket: Bucket, positions: Collection[int]) -> None:
        self._state.write_parameters(bucket, positions)

    def read_state(self, buckets: Sequence[Bucket]) -> dict[str, dict[str, torch.Tensor]]:
        return self._state.read(buckets)

    def write_state(self, buckets: Sequence[Bucket], states: Mapping[str, ParameterState]) -> None:
        self._state.write(buckets, states)

    def gradients_moved(self, buckets: Sequence[Bucket]) -> None:
        if self._placed:
            self._place([bucket for bucket in buckets if bucket not in self._rounds])

    def together(self) -> AbstractContextManager[None]:
        # On a network the first buckets travel while later ones are sent or encoded.
        return nullcontext() if self._wired or self._compress else self._client.batched()

    def pull(self, bucket: Bucket) -> Work:
        if self.steps_on == "worker":
            return super().pull(bucket)
        index = bucket.spec.index
        return bucket.stage.pull(
            f"the pull of bucket {index}", lambda: self._exchange.pull(index, bucket.host_values)
        )

    def record_pushes(self) -> PushRecord | None:
        if self.lockstep or self.steps_on == "worker":
            return None
        if self._pushes is None:
            self._pushes = HubPushes(self._client, self._exchange)
        return self._pushes

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        shards = self._shards_of(call)
        came: dict[int, list[torch.Tensor]] = {}
        carried = Work(work.what, len(shards))
        work.attend = self._client.attend
        numbers: dict[int, int] = {}

        def on_end(_: Work) -> None:
            for shard, number in numbers.items():
                self._call_ids[shard].close(number)
            if carried.error is None:
                work.deliver(came[shards[0]])
            else:
                work.fail(carried.error)

        with self._calling:  # calls with one name must arrive in the order of their numbers
            for shard in shards:
                numbers[shard], settled, closed = self._call_ids[shard].open()
                request = Contribute(self._client.sender, numbers[shard], call, tensors, settled, closed)
                self._client.contribute(shard, request, carried, partial(_keep, came, shard))
        carried.when_done(on_end)

    def _shards_of(self, call: Call) -> range:
        """Returns the shards of a call. All ranks compute the same shard from the name; a join uses all."""
        if call.collective is Collective.JOIN:
            return range(len(self._session.shards))
        shard = zlib.crc32(call.name.encode()) % len(self._session.shards)
        return range(shard, shard + 1)

    def keep_parameters(self) -> None:
        self._client.close()

    def close(self, *, finished: bool) -> None:
        self._client.close()

    def _agree(self, specs: list[BucketSpec]) -> Assignment:
        """Returns the job's plan for these buckets; measures the slice size if the server has not set one."""
        deadline = time.monotonic() + self.timeout
        assigned = self._session.plan(specs)
        while assigned.undecided and self.late:  # the other workers are measuring
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the workers of the running job did not choose a slice size within {self.timeout:g} s:"
                    " restart this worker once the job takes steps"
                )
            assigned = self._session.plan(specs)
        if assigned.undecided:
            assigned = self._session.plan(specs, self._best_slices(specs))
        return assigned

    def _best_slices(self, specs: list[BucketSpec]) -> Slicing:
        if self._compress:  # compressed slices are so short that their size hardly matters
            return Slicing(SLICE_BYTES)
        best = SliceTrial(self, self._session, self._client, specs, wired=self._wired).best()
        self._client.traffic.clear()  # do not count the trial's traffic
        return best

    def _specs(self, buckets: list[Bucket]) -> list[BucketSpec]:
        """Returns the hub's buckets: the model's buckets, or two buckets of factors for each."""
        kind, argument = parse(self._compress) if self._compress else CodecSpec("")
        if kind != "powersgd":
            return [replace(bucket.spec, codec=self._compress) for bucket in buckets]
        for bucket in buckets:
            low_rank = LowRankMean(bucket.spec, bucket.gradients.dtype, int(argument), self.allocate)
            self._low_rank[bucket.spec.index] = low_rank
        return [spec for low_rank in self._low_rank.values() for spec in low_rank.specs]

    def _place(self, buckets: list[Bucket]) -> None:
        """Exchanges by GPU address from now on if the hub's store is on the model's GPU."""
        memory = shared_memory(self._session.shards, buckets, self._session.mode)
        if memory is None:
            return
        reached = Reached(memory)
        for bucket in buckets:
            index = bucket.spec.index
            self._placed[index] = PlacedBucket(
                bucket, self._exchange.slices[index], self._lands, memory, reached, self.allocate
            )

    @property
    def _lands(self) -> Lands:
        return "values" if self.steps_on == "server" else "gradients"

    def _check_attachable(self, buckets: list[Bucket]) -> None:
        again = any(bucket.spec.index in self._exchange.slices for bucket in buckets)
        if again and self.steps_on == "server":  # the hub's plan is for one optimizer
            raise ConfigError(
                "this is the second DistributedOptimizer, and the hub can step only one: let the workers"
                " step with hubring.init(aggregate=True) or --aggregate; or use one optimizer with all"
                " parameters in groups, and pass named_parameters=... to name them"
            )
        if self.late and self.steps_on == "worker":
            raise ConfigError(
                "a worker cannot join a running job with --aggregate, because only the workers have the"
                " parameters: restart all workers of the job, or restart them without --aggregate"
            )

    def _attach_rounds(self, buckets: list[Bucket]) -> Start:
        """Attaches a later optimizer where workers step. Each of its buckets is a collective."""
        for bucket in buckets:
            self._rounds[bucket] = f"gradients {next(self._numbers)}"
        if self._compress:
            log.info("--compress %s applies to the first optimizer only", self._compress)
        self._broadcast_parameters(buckets)
        return Start()

    def _bring_parameters(
        self, buckets: list[Bucket], assigned: Assignment, states: Mapping[str, ParameterState]
    ) -> None:
        """Rank 0 initialises the shards; then all ranks pull the values."""
        if self.rank == 0 and not assigned.initialised:
            pieces = [
                (bucket, piece) for bucket in buckets for piece in self._exchange.slices[bucket.spec.index]
            ]
            given = Work("sending the first parameters to the hub", len(pieces))
            for bucket, piece in pieces:
                values = bucket.host_values[piece.offset : piece.offset + piece.numel]
                state = state_of_slice(states, piece, bucket.spec) if states else None
                self._client.init(piece.shard, piece.key, values, given, state)
            given.wait(self.timeout)
        for bucket, work in [(bucket, self.pull(bucket)) for bucket in buckets]:
            work.wait(self.timeout)
            bucket.stage.arrive()

    def _learn_clocks(self, buckets: list[Bucket]) -> None:
        """Pulls once to learn the shards' rounds. Shards that only average have no parameters."""
        homes = {bucket.spec.index: bucket.host_gradients for bucket in buckets}
        if self._low_rank:
            homes = {
                spec.index: torch.empty_like(phase)  # do not overwrite the first guess of Q
                for low_rank in self._low_rank.values()
                for spec, phase in zip(low_rank.specs, low_rank.phases, strict=True)
            }
        for work in [self._exchange.pull(index, home) for index, home in homes.items()]:
            work.wait(self.timeout)
        for bucket in buckets:
            bucket.host_gradients.zero_()

    def _broadcast_parameters(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            given = [bucket.values] if self.rank == 0 else []
            call = Call(Collective.BROADCAST, f"parameters of bucket {bucket.spec.index}")
            bucket.values.copy_(self.collective(call, *given).get())


class HubPushes:
    """Records the pushes of one worker to an asynchronous hub.

    Args:
        client: Learns where each push was applied.
        exchange: Knows the keys.

    """

    def __init__(self, client: KVClient, exchange: SliceExchange) -> None:
        self._answered: list[AppliedPush] = []
        self.key_of = exchange.key_of
        client.on_push = lambda key, position, version: self._answered.append(
            AppliedPush(key, position, version)
        )

    def take(self) -> list[AppliedPush]:
        """Returns the pushes that were answered since the last call, in the order of the answers."""
        taken = self._answered[:]
        del self._answered[: len(taken)]  # not clear(): another thread adds to the end
        return taken


def _tensor(allocate: Callable[[int], memoryview], numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(allocate(numel * dtype.itemsize), dtype=dtype, count=numel)


def _keep(came: dict[int, list[torch.Tensor]], shard: int, results: tuple[torch.Tensor, ...]) -> None:
    came[shard] = [result.clone() for result in results]
