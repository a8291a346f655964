"""The hub's communicator: splits buckets into slices and sends each slice to its shard."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from hubring.ps.client.client import KVClient
from hubring.ps.client.session import Assignment, Session
from hubring.ps.compression.gpu_tensor import Reached
from hubring.ps.core.errors import ConfigError, DeadlineExceeded, RingBroken
from hubring.ps.core.messages import Call
from hubring.ps.core.types import BucketSpec, CodecSpec, Slicing, StepHyper, parse_codec
from hubring.ps.core.work import Work
from hubring.ps.job.sharding import SLICE_BYTES
from hubring.ps.transport.base import Transport
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.staging import Lands
from hubring.workers.buckets.value_memory import ComparedValues, ValueMemory, WindowValues
from hubring.workers.communicators.base import CollectiveWork, Communicator, ParameterState, SteppingHub
from hubring.workers.communicators.gpu_sharing import PlacedBucket, shared_memory
from hubring.workers.communicators.host_collectives import HostCollectives
from hubring.workers.communicators.host_level import HostLevel, meet
from hubring.workers.communicators.hub_collectives import HubCollectives
from hubring.workers.communicators.hub_state import HubState, state_of_slice
from hubring.workers.communicators.powersgd import LowRankMean
from hubring.workers.communicators.residuals import Residual
from hubring.workers.communicators.slice_exchange import Absence, SliceExchange, exchange_name, start_mean
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
        compress: Codec of the gradients, as in `hubring.ps.core.types`; empty: no compression.
        host: Names this worker's host. The workers of one host add their gradients before they push them, if
            all are in bsp and have one; empty: each pushes its own.
    """

    topology = "hub"
    weighs = True

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
        host: str = "",
    ) -> None:
        self.rank = session.sender.rank
        self.size = session.size
        self.late = session.late
        self.lockstep = session.lockstep
        self.timeout: float = timeout
        self.steps_on: Literal["server", "worker"] = "worker" if aggregate else "server"
        self.traffic = client.traffic
        self._beside = False
        """Whether the hub steps for another optimizer, so that all buckets here are collectives."""
        self._session = session
        self._client = client
        self._transport = transport
        self._wired = wired
        self._exchange = SliceExchange(client, means=aggregate)
        self._compress = compress
        self._host, self._local = host, bool(host) and wired
        self._level: HostLevel | None = None
        self.tunable = not host  # the workers of a host must send their buckets in one order
        self._low_rank: dict[int, LowRankMean] = {}
        """By bucket index, with PowerSGD."""
        self._placed: dict[int, PlacedBucket] = {}
        """By bucket index, if the hub's store is on the model's GPU."""
        self._rounds: WeakKeyDictionary[Bucket, str] = WeakKeyDictionary()
        """Collective names of buckets without slices: those of a second or later optimizer."""
        self._numbers = count(1)
        self._collectives = HostCollectives(self, HubCollectives(client, len(session.shards)).take_part)
        if not aggregate:
            self.stepping_hub = HubState(client, self._exchange, timeout, lockstep=self.lockstep)
        session.on_failure(client.fail)
        session.on_failure(self._collectives.fail)
        session.on_failure(lambda error: self._end_level(str(error)))

    @property
    def _lands(self) -> Lands:
        """Where answers land, for buckets on a GPU."""
        return "gradients" if self.steps_on == "worker" else "values"

    @property
    def draining(self) -> bool:  # type: ignore[override]
        return self._client.draining

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel == 0:
            return torch.zeros(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._transport.allocate(numel * dtype.itemsize), dtype=dtype, count=numel)

    def allocate_values(self, numel: int, dtype: torch.dtype, device: torch.device) -> ValueMemory:
        if self.steps_on == "worker" or numel == 0:
            return super().allocate_values(numel, dtype, device)
        # What another worker passes on cannot land where a shard's pages are mapped.
        if device.type != "cpu" or (self._local and self._transport.name == "shm"):
            return ComparedValues(numel, dtype, device)
        return WindowValues(self._transport.window(numel * dtype.itemsize), dtype)

    def averaging(self, why: str, *, again: bool = False) -> PSCommunicator:
        if self.steps_on == "worker":
            return self
        if not self.lockstep:
            raise ConfigError(
                f"{why}; an asynchronous hub cannot average for the worker's own optimizer instead: change"
                " that, or start the server with --mode bsp"
            )
        if self.rank == 0:
            log.info("the hub averages, and the worker's own optimizer steps: %s", why)
        beside = bool(self._exchange.slices) and not again
        if beside and self._session.saves:
            raise ConfigError(
                f"{why}, and the checkpoints of a hub have only what it steps: let the workers step from the"
                " start, and save, with hubring.init(aggregate=True) or --aggregate"
            )
        here = copy(self) if beside else self
        here.steps_on = "worker"
        here._exchange = SliceExchange(self._client, means=True)
        here._placed, here.stepping_hub = {}, None
        if beside:
            here._beside, here._rounds, here.registry = True, WeakKeyDictionary(), None
        return here

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        if self.late and self.steps_on == "worker":
            raise ConfigError(
                "a worker cannot join a running job with --aggregate, because only the workers have the"
                " parameters: restart all workers of the job, or restart them without --aggregate"
            )
        if self.steps_on == "worker" and (self._exchange.slices or self._beside):
            return self._attach_rounds(buckets)
        extends = bool(self._exchange.slices)
        specs = self._specs(buckets)
        assigned = self._agree(specs)
        for spec in specs:
            self._exchange.add(spec, assigned.plan.of_bucket(spec.index))
        if not self._low_rank:
            self._exchange.compress(buckets, self._compress, self.allocate)
        if self.stepping_hub is not None:
            self._bring_parameters(self.stepping_hub, buckets, assigned, state or {})
        else:
            self._learn_clocks(buckets)
            self.broadcast_parameters(buckets)
        self._place(buckets)
        if self._host and not self.late and self.size > 1:
            near = bool(self._placed) or not self._wired
            if near:
                log.info("--local has no effect for rank %d: all shards are on its host", self.rank)
            self._level, self._host = meet(self, self._client, "" if near else self._host), ""
        if extends or (self.lockstep and not self.late):
            return assigned.step
        # Of a running job the coordinator only knows the step of the last heartbeats. In asynchronous modes a
        # resumed worker continues at a step of its own.
        completed = self._client.completed if self.late else self._client.resume()
        return max(assigned.step, completed)

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        """As `Communicator.push_pull`; `bucket.absent` are the parameters without a gradient on this rank.

        A hub that steps leaves the parameters that are absent on every rank unchanged. Where the workers
        step, `bucket.absent` has only these parameters once the work is done.
        """
        index = bucket.spec.index
        name = self._rounds.get(bucket) if self._rounds else None
        absent = Absence(bucket, reports=self.steps_on == "worker") if bucket.absent else None
        if index in self._placed and name is None:
            placed, what = self._placed[index], exchange_name(index)
            return placed.push_pull(what, self._client, hyper, absent, bucket.weight)

        if bucket.stage is None:
            return self._start(bucket, name, hyper, absent)
        start = partial(self._start, bucket, name, hyper, absent)
        return bucket.stage.push_pull(exchange_name(index), start, self._lands)

    def _start(self, bucket: Bucket, name: str | None, hyper: StepHyper, absent: Absence | None) -> Work:
        """Starts the exchange of gradients in host memory, as a collective if it has a name."""
        if name is not None:
            return start_mean(self, name, bucket, bucket.host_gradients)
        index, weight = bucket.spec.index, bucket.weight
        low_rank = self._low_rank.get(index)
        if low_rank is not None:
            phases = low_rank.phases
            first = 2 * index  # only its slices have every parameter of the bucket
            return low_rank.exchange(
                bucket.host_gradients,
                lambda n: self._exchange.push_pull(
                    first + n, phases[n], phases[n], hyper, None if n else absent, weight=weight
                ),
                lambda: bucket.absent,
            )
        gradients = bucket.host_gradients
        into = gradients if self.steps_on == "worker" else bucket.host_values
        if self._level is not None and weight is None and self._exchange.slices[index]:
            reports = self.steps_on == "worker"
            started = self._level.push_pull(self._exchange, bucket, into, hyper, absent, reports=reports)
            if started is not None:
                return started
        waits = self.waits_soon
        return self._exchange.push_pull(index, gradients, into, hyper, absent, waits=waits, weight=weight)

    def gradients_moved(self, buckets: Sequence[Bucket]) -> None:
        if self._placed:
            self._place([bucket for bucket in buckets if bucket not in self._rounds])

    def read_residuals(self) -> dict[str, torch.Tensor]:
        means = (
            self._exchange.read_means(self.timeout) if self.steps_on == "worker" and self.rank == 0 else {}
        )
        return {**super().read_residuals(), **means}

    def write_residuals(self, whole: Mapping[str, torch.Tensor]) -> bool:
        if self.steps_on == "worker" and self.rank == 0:
            self._exchange.write_means(whole, self.timeout)
        return super().write_residuals(whole)

    def residuals(self) -> list[Residual]:
        low_rank = [residual for one in self._low_rank.values() for residual in one.residuals()]
        return low_rank or self._exchange.residuals()

    def together(self) -> AbstractContextManager[None]:
        # On a network the first buckets travel while later ones are sent or encoded.
        return nullcontext() if self._wired or self._compress else self._client.batched()

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        self._collectives.take_part(call, tensors, work)

    def is_held(self) -> bool:
        waits = self._level is not None and self._level.waits
        return waits or self._client.held() or self._collectives.waits

    def close(self, *, finished: bool) -> None:
        reason = f"rank {self.rank} has left the job"
        self._collectives.fail(RingBroken(reason))
        self._end_level(reason)
        self._client.close()

    def _end_level(self, reason: str) -> None:
        if self._level is not None:
            self._level.close(reason)

    def _agree(self, specs: list[BucketSpec]) -> Assignment:
        """Returns the job's plan for these buckets; measures the slice size if the server has not set one."""
        deadline = time.monotonic() + self.timeout
        assigned = self._session.plan(specs)
        while assigned.undecided and self.late:  # the other workers are measuring, or in their first step
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the workers of the running job did not complete a step within {self.timeout:g} s:"
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
        kind, argument = parse_codec(self._compress) if self._compress else CodecSpec("")
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

    def _attach_rounds(self, buckets: list[Bucket]) -> int:
        """Attaches a later optimizer where workers step. Each of its buckets is a collective."""
        for bucket in buckets:
            self._rounds[bucket] = f"gradients {next(self._numbers)}"
        if self._compress:
            log.info("--compress %s applies to the first optimizer only", self._compress)
        self.broadcast_parameters(buckets)
        return 0

    def _bring_parameters(
        self,
        hub: SteppingHub,
        buckets: list[Bucket],
        assigned: Assignment,
        states: Mapping[str, ParameterState],
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
        for bucket, work in [(bucket, hub.pull(bucket)) for bucket in buckets]:
            work.wait(self.timeout)
            bucket.arrive()

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
