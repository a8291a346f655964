"""The hub's communicator: buckets become slices, slices go to the shards that hold them."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from hubring.ps.client.client import Decode, KVClient
from hubring.ps.client.session import Assignment, Session
from hubring.ps.compression.compressor import codec_for
from hubring.ps.core.codecs import CodecSpec, parse
from hubring.ps.core.errors import ConfigError, DeadlineExceeded
from hubring.ps.core.messages import Call, Collective, Contribute, ReduceOp
from hubring.ps.core.types import BucketSpec, Hyper, Slice, Slicing
from hubring.ps.core.work import Work
from hubring.ps.job.sharding import SLICE_BYTES
from hubring.ps.store.gpu_tensor import Reached
from hubring.ps.transport.base import Transport
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.buckets.staging import Lands
from hubring.workers.communicators.base import CollectiveWork, Communicator, Start
from hubring.workers.communicators.call_ids import CallIds
from hubring.workers.communicators.gpu_sharing import PlacedBucket, shared_memory
from hubring.workers.communicators.powersgd import LowRankMean
from hubring.workers.communicators.slice_coder import SliceCoder
from hubring.workers.communicators.slice_tuning import SliceTrial

log = logging.getLogger(__name__)


class PSCommunicator(Communicator):
    """Talks to the parameter server.

    Args:
        session: This worker's place in the job; not closed with the communicator.
        client: Its lines to the shards; closed with the communicator.
        transport: Whose memory the buckets should lie in.
        wired: Some shard is reached over a wire, and not in shared memory.
        aggregate: The hub only averages; the worker's own optimizer steps.
        timeout: Seconds that one exchange may take.
        compress: What gradients are compressed with, as `hubring.ps.core.codecs` spells it; empty: nothing.
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
        self._slices: dict[int, list[Slice]] = {}
        """Of every bucket that the hub knows, by its index there."""
        self._compress = compress
        self._coders: dict[int, SliceCoder] = {}
        """Of every slice that travels in a codec, by its key."""
        self._low_rank: dict[int, LowRankMean] = {}
        """Of every bucket, by its index, where factors travel in its place."""
        self._placed: dict[int, PlacedBucket] = {}
        """Of every bucket, by its index, where the hub's store is on its GPU."""
        self._rounds: WeakKeyDictionary[Bucket, str] = WeakKeyDictionary()
        """The name of each bucket that has no slices, as it belongs to a second optimizer or a later one."""
        self._numbers = count(1)
        self._call_ids = [CallIds() for _ in session.shards]
        self._calling = threading.Lock()
        session.on_failure(client.fail)

    @property
    def draining(self) -> bool:  # type: ignore[override]
        return self._client.draining

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return _tensor(self._transport.allocate, numel, dtype)

    def allocate_values(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return _tensor(self._transport.window, numel, dtype)

    def attach(self, buckets: list[Bucket]) -> Start:
        self._check_attachable()
        if self._slices:
            return self._attach_rounds(buckets)
        specs = self._specs(buckets)
        assigned = self._agree(specs)
        self._slices = {spec.index: assigned.plan.of_bucket(spec.index) for spec in specs}
        if not self._low_rank:
            for bucket in buckets:
                self._make_coders(bucket)
        if self.steps_on == "server":
            self._bring_parameters(buckets, assigned)
        else:
            self._learn_clocks(buckets)
            self._broadcast_parameters(buckets)
        self._place(buckets)
        # What the coordinator knows of a running job is as old as its workers' last heartbeats.
        return Start(max(assigned.step, self._client.completed) if self.late else assigned.step)

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        what = _exchange(bucket.spec.index)
        name = self._rounds.get(bucket)
        if name is not None:
            return bucket.stage.push_pull(what, lambda: self._mean(name, bucket.host_gradients), self._lands)
        placed = self._placed.get(bucket.spec.index)
        if placed is not None:
            return placed.push_pull(what, self._client, hyper)
        return bucket.stage.push_pull(what, lambda: self._start(bucket, hyper), self._lands)

    def _start(self, bucket: Bucket, hyper: Hyper) -> Work:
        """Begins the exchange of gradients that are in host memory by now."""
        index = bucket.spec.index
        low_rank = self._low_rank.get(index)
        if low_rank is not None:
            phases = low_rank.phases
            return low_rank.exchange(lambda n: self._push_pull(2 * index + n, phases[n], phases[n], hyper))
        into = bucket.host_values if self.steps_on == "server" else bucket.host_gradients
        return self._push_pull(index, bucket.host_gradients, into, hyper)

    def _mean(self, name: str, gradients: torch.Tensor) -> Work:
        """The mean of all ranks' gradients, in a round of its own."""
        call = Call(Collective.ALLREDUCE, name, ReduceOp.AVERAGE)
        return self.collective(call, gradients, then=lambda came: gradients.copy_(came[0]))

    def together(self) -> AbstractContextManager[None]:
        # On a wire the first are to travel while the others are handed over, or still encoded.
        return nullcontext() if self._wired or self._compress else self._client.batched()

    def pull(self, bucket: Bucket) -> Work:
        if self.steps_on == "worker":
            return super().pull(bucket)
        index = bucket.spec.index
        return bucket.stage.pull(f"the pull of bucket {index}", lambda: self._pull(index, bucket.host_values))

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

        with self._calling:  # calls under one name must come in the order of their numbers
            for shard in shards:
                numbers[shard], settled, closed = self._call_ids[shard].open()
                request = Contribute(self._client.sender, numbers[shard], call, tensors, settled, closed)
                self._client.contribute(shard, request, carried, partial(_keep, came, shard))
        carried.when_done(on_end)

    def _shards_of(self, call: Call) -> range:
        """Where the ranks meet: every one finds the same shard by the name alone. To join concerns all."""
        if call.collective is Collective.JOIN:
            return range(len(self._session.shards))
        shard = zlib.crc32(call.name.encode()) % len(self._session.shards)
        return range(shard, shard + 1)

    def keep_parameters(self) -> None:
        self._client.close()

    def close(self, *, finished: bool) -> None:
        self._client.close()

    def _push_pull(self, index: int, gradients: torch.Tensor, into: torch.Tensor, hyper: Hyper) -> Work:
        slices = self._slices[index]
        work = Work(_exchange(index), len(slices), self._client.attend)
        # Where slices are encoded one by one, each leaves while the next one is.
        with nullcontext() if self._coders else self._client.batched():
            for piece in reversed(
                slices
            ):  # by priority, so that all ranks send in one order from the first on
                part = slice(piece.offset, piece.offset + piece.numel)
                coder = self._coders.get(piece.key)
                gradient = gradients[part] if coder is None else coder.encode()
                target, decode = self._target(piece, into[part])
                self._client.push_pull(piece.shard, piece.key, gradient, target, hyper, work, decode)
        return work

    def _pull(self, index: int, into: torch.Tensor) -> Work:
        slices = self._slices[index]
        work = Work(f"the pull of bucket {index}", len(slices), self._client.attend)
        with self._client.batched():
            for piece in slices:
                target, decode = self._target(piece, into[piece.offset : piece.offset + piece.numel])
                self._client.pull(piece.shard, piece.key, target, work, decode)
        return work

    def _target(self, piece: Slice, into: torch.Tensor) -> tuple[torch.Tensor, Decode | None]:
        """Where an answer lands: parameters always come as they are, means in the codec of the gradients."""
        coder = self._coders.get(piece.key)
        if coder is None or self.steps_on == "server":
            return into, None
        return coder.payload, coder.decode

    def _agree(self, specs: list[BucketSpec]) -> Assignment:
        """The job's plan for these buckets; found out together, if the server leaves that to the workers."""
        deadline = time.monotonic() + self.timeout
        assigned = self._session.plan(specs)
        while assigned.undecided and self.late:  # the others are finding out: the server answers when it can
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the workers of the running job did not agree on their slices within {self.timeout:g} s:"
                    " start this one again once the job takes steps"
                )
            assigned = self._session.plan(specs)
        if assigned.undecided:
            assigned = self._session.plan(specs, self._best_slices(specs))
        return assigned

    def _best_slices(self, specs: list[BucketSpec]) -> Slicing:
        if self._compress:  # what travels of a slice is so short that its size hardly counts
            return Slicing(SLICE_BYTES)
        best = SliceTrial(self, self._session, self._client, specs, wired=self._wired).best()
        self._client.traffic.clear()  # all of it was the trial's
        return best

    def _specs(self, buckets: list[Bucket]) -> list[BucketSpec]:
        """What the hub is to hold: the buckets, or two of factors for each of them."""
        kind, argument = parse(self._compress) if self._compress else CodecSpec("")
        if kind != "powersgd":
            return [replace(bucket.spec, codec=self._compress) for bucket in buckets]
        for bucket in buckets:
            low_rank = LowRankMean(bucket.spec, bucket.host_gradients, int(argument), self.allocate)
            self._low_rank[bucket.spec.index] = low_rank
        return [spec for low_rank in self._low_rank.values() for spec in low_rank.specs]

    def _make_coders(self, bucket: Bucket) -> None:
        """For the slices that get shorter by it; their payloads lie in the transport's memory."""
        for piece in self._slices[bucket.spec.index]:
            part = bucket.host_gradients[piece.offset : piece.offset + piece.numel]
            codec = codec_for(self._compress, piece.numel, part.dtype)
            if codec is not None:
                payload = self.allocate(codec.nbytes(piece.numel), torch.uint8)
                self._coders[piece.key] = SliceCoder(codec, part, payload)

    def _place(self, buckets: list[Bucket]) -> None:
        """Where the hub's store is on the model's GPU, slices are read there from now on."""
        memory = shared_memory(self._session.shards, buckets, self._session.mode)
        if memory is None:
            return
        reached = Reached(memory)
        for bucket in buckets:
            index = bucket.spec.index
            self._placed[index] = PlacedBucket(
                bucket, self._slices[index], self._lands, memory, reached, self.allocate
            )

    @property
    def _lands(self) -> Lands:
        return "values" if self.steps_on == "server" else "gradients"

    def _check_attachable(self) -> None:
        if self._slices and self.steps_on == "server":  # the plan is one optimizer's
            raise ConfigError(
                "the hub steps for one DistributedOptimizer, and this is the second: let the workers' own"
                " step, with hubring.init(aggregate=True) or --aggregate; or give all parameters to one"
                " optimizer, in groups, with named_parameters=... to tell them apart"
            )
        if self.late and self.steps_on == "worker":
            raise ConfigError(
                "with --aggregate the parameters are the workers' own, so nobody can join a job that runs:"
                " start all its workers again, or without --aggregate"
            )

    def _attach_rounds(self, buckets: list[Bucket]) -> Start:
        """Where workers step, later optimizers need no plan: each of their buckets is a collective."""
        for bucket in buckets:
            self._rounds[bucket] = f"gradients {next(self._numbers)}"
        if self._compress:
            log.info("--compress %s: for the first optimizer alone", self._compress)
        self._broadcast_parameters(buckets)
        return Start()

    def _bring_parameters(self, buckets: list[Bucket], assigned: Assignment) -> None:
        """Rank 0 gives the shards their first values; then everybody reads the same ones."""
        if self.rank == 0 and not assigned.initialised:
            given = Work("giving the hub its parameters", len(assigned.plan.slices))
            for piece in assigned.plan.slices:
                values = buckets[piece.bucket].host_values[piece.offset : piece.offset + piece.numel]
                self._client.init(piece.shard, piece.key, values, given)
            given.wait(self.timeout)
        for bucket, work in [(bucket, self.pull(bucket)) for bucket in buckets]:
            work.wait(self.timeout)
            bucket.stage.arrive()

    def _learn_clocks(self, buckets: list[Bucket]) -> None:
        """Aggregate-only shards hold no parameters, but count rounds as any."""
        homes = {bucket.spec.index: bucket.host_gradients for bucket in buckets}
        if self._low_rank:
            homes = {
                spec.index: torch.empty_like(phase)  # the first guess of Q must not be lost
                for low_rank in self._low_rank.values()
                for spec, phase in zip(low_rank.specs, low_rank.phases, strict=True)
            }
        for work in [self._pull(index, home) for index, home in homes.items()]:
            work.wait(self.timeout)
        for bucket in buckets:
            bucket.host_gradients.zero_()

    def _broadcast_parameters(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            given = [bucket.values] if self.rank == 0 else []
            call = Call(Collective.BROADCAST, f"parameters of bucket {bucket.spec.index}")
            bucket.values.copy_(self.collective(call, *given).get())


def _tensor(allocate: Callable[[int], memoryview], numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(allocate(numel * dtype.itemsize), dtype=dtype, count=numel)


def _keep(came: dict[int, list[torch.Tensor]], shard: int, results: tuple[torch.Tensor, ...]) -> None:
    came[shard] = [result.clone() for result in results]


def _exchange(index: int) -> str:
    return f"the exchange of bucket {index}"
