"""Finds out by trying how large a hub's slices should be, and on how many shards they should lie.

Small ones pipeline: while one is summed, another is on its way. Large ones cost
fewer messages. Before the job's first values exist, all ranks push zeros in
slices of every size, through the wires and the shards that they will use. Timed
is a mean's way there and back; the optimizer's step, which needs values, is not.
Where nothing travels, in shared memory, there is nothing to pipeline or to try; shards
that the machine has no core for would only take turns with the others, and get none.

The law: whatever the ranks do here they do alike, since each decision is made of
what all hold alike, or of one list of numbers that they reduced together.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from hubring.ps.client.client import KVClient
from hubring.ps.client.session import Session
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.core.timing import fastest
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, Slice, Slicing, TensorSpec
from hubring.ps.core.work import Work
from hubring.ps.job.sharding import SLICE_BYTES, plan
from hubring.workers.communicators.base import Communicator

log = logging.getLogger(__name__)

SIZES = (SLICE_BYTES, 1 << 20, 2 << 20, 8 << 20)
"""Bytes to try; the first is taken where it makes no difference."""
TURNS = 2
EXCHANGES = 3
"""Exchanges of a turn; the first, which touches new memory, does not count."""
TRIAL_BYTES = 32 << 20
"""So much of a large model tells enough."""
BUDGET = 2.0
"""Seconds that all turns may take together; where that is too little for one, nothing is tried."""
SIZES_IN_MEMORY = (SLICE_BYTES, 8 << 20, 16 << 20, 24 << 20, 32 << 20, 64 << 20)
"""Bytes among which shared memory has its own; a shard that steps one slice answers nobody meanwhile."""
OVERHEAD = 2 << 20
"""Bytes that a shard sums and steps in the time that the messages of one slice cost, there and back: half a
millisecond, in which one of 2 cores sums 2 MiB from 2 workers."""


class SliceTrial:
    """One trial of all ranks together; they must hold the same buckets.

    Args:
        communicator: For what ranks say to each other, and for memory to send from.
        session: Where trial plans come from.
        client: Lines to the shards.
        specs: The model's buckets, uncompressed.
        wired: This rank reaches some shard over a wire; else it has all in shared memory.
    """

    def __init__(
        self,
        communicator: Communicator,
        session: Session,
        client: KVClient,
        specs: Sequence[BucketSpec],
        *,
        wired: bool,
    ) -> None:
        self._communicator = communicator
        self._session = session
        self._client = client
        self._wired = wired
        # Averaged alone: what has no optimizer needs no first values.
        self._specs = [replace(spec, optimizer="") for spec in _up_to(TRIAL_BYTES, specs)]
        self._whole = specs
        self._zeros: dict[int, torch.Tensor] = {}
        """What is pushed of each bucket, by its index, and where the mean lands."""

    def best(self) -> Slicing:
        """With the size with which the slowest rank's exchange was the shortest, on all shards.

        Where all ranks have all shards in shared memory, with the one that leaves the busiest shard the least
        to do, on no more shards than the machine has cores.

        Raises:
            HubringError: What an exchange failed with.
        """
        if self._agree([float(self._wired)]) == [0.0]:
            known = len(self._session.shards)
            # The machine's cores: those that this rank may use can be others than the shards'.
            shards = min(known, os.cpu_count() or known)
            size = in_memory(self._whole, shards)
            where = f", on {shards} of {known} shards: there are no more cores" if shards < known else ""
            self._tell(f"gradients lie in shared memory, in slices of at most {_mib(size)}{where}")
            return Slicing(size, shards)
        sizes = self._different()
        if len(sizes) == 1:
            return Slicing(sizes[0])
        self._zeros = {spec.index: self._allocate(spec) for spec in self._specs}
        turns = min(TURNS, int(BUDGET / self._seconds_a_turn(sizes)))
        if not turns:
            self._tell(
                f"gradients travel in slices of at most {_mib(sizes[0])}; trying others takes too long"
            )
            return Slicing(sizes[0])
        taken: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(turns):
            for size in sizes:
                taken[size] += self._turn(size)
        seconds = self._agree([median(taken[size]) for size in sizes])
        medians = dict(zip(sizes, seconds, strict=True))
        best = fastest(medians)
        self._tell(_report(best, medians))
        return Slicing(best)

    def _different(self) -> list[int]:
        """Sizes that cut the buckets differently."""
        cuts: dict[int, int] = {}
        for size in SIZES:
            cuts.setdefault(len(plan(self._specs, 1, size).slices), size)
        return list(cuts.values())

    def _allocate(self, spec: BucketSpec) -> torch.Tensor:
        return self._communicator.allocate(spec.numel, getattr(torch, spec.dtype))

    def _seconds_a_turn(self, sizes: Sequence[int]) -> float:
        """About how long a turn of all sizes takes, by the slowest rank's pull of one slice a shard."""
        slices = self._drawn(sizes[0])
        largest = {piece.shard: piece for piece in sorted(slices, key=lambda piece: piece.numel)}
        probe = list(largest.values())
        self._pull(probe)  # touches new memory
        self._barrier()
        (seconds,) = self._agree([self._pull(probe)])
        part = sum(piece.numel for piece in probe) / sum(piece.numel for piece in slices)
        return len(sizes) * (1 + EXCHANGES) * max(seconds, 1e-6) / part

    def _turn(self, size: int) -> list[float]:
        """Seconds of each exchange that counts, in slices of `size`."""
        slices = self._drawn(size)
        self._pull(slices)  # tells with which clocks to push
        return [self._exchange(slices) for _ in range(EXCHANGES)][1:]

    def _drawn(self, size: int) -> Sequence[Slice]:
        """What the shards hold from now on."""
        self._barrier()  # nobody uses the last plan any more
        slices = self._session.plan(self._specs, Slicing(size), trial=True).plan.slices
        self._barrier()  # nobody is asking for this one still
        return slices

    def _pull(self, slices: Sequence[Slice]) -> float:
        began = time.monotonic()
        work = Work("a pull of zeros", len(slices), self._client.attend)
        with self._client.batched():
            for piece in slices:
                self._client.pull(piece.shard, piece.key, self._part(piece), work)
        work.wait(self._communicator.timeout)
        return time.monotonic() - began

    def _exchange(self, slices: Sequence[Slice]) -> float:
        self._barrier()
        began = time.monotonic()
        work = Work("an exchange of zeros", len(slices), self._client.attend)
        with self._client.batched():
            for piece in slices:
                part = self._part(piece)
                self._client.push_pull(piece.shard, piece.key, part, part, {}, work)
        work.wait(self._communicator.timeout)
        return time.monotonic() - began

    def _part(self, piece: Slice) -> torch.Tensor:
        return self._zeros[piece.bucket][piece.offset : piece.offset + piece.numel]

    def _barrier(self) -> None:
        self._communicator.collective(Call(Collective.BARRIER, "slices.barrier")).wait()

    def _agree(self, seconds: list[float]) -> list[float]:
        own = torch.tensor(seconds, dtype=torch.float64)
        call = Call(Collective.ALLREDUCE, "slices", ReduceOp.MAX)
        return [float(each) for each in self._communicator.collective(call, own).get()]

    def _tell(self, sentence: str) -> None:
        if self._communicator.rank == 0:
            log.info("%s", sentence)


def in_memory(specs: Sequence[BucketSpec], shards: int) -> int:
    """Bytes of the slices with which the busiest shard has least to do, where nothing travels.

    Large ones cost it fewer messages, but may leave it with one more than the others. The last bucket
    counts twice, once for itself: no backward hides it, so all shards should be at it.
    """
    widths = {spec.index: DTYPE_BYTES[spec.dtype] for spec in specs}
    last = max(widths, default=0)

    def cost(size: int) -> int:
        loads, late = [0] * shards, [0] * shards
        for piece in plan(specs, shards, size).slices:
            work = piece.numel * widths[piece.bucket] + OVERHEAD
            loads[piece.shard] += work
            late[piece.shard] += work * (piece.bucket == last)
        return max(loads) + max(late)

    return min(SIZES_IN_MEMORY, key=cost)


def _up_to(nbytes: int, specs: Sequence[BucketSpec]) -> list[BucketSpec]:
    """The first `nbytes` of the buckets, the last one cut off."""
    chosen: list[BucketSpec] = []
    for spec in specs:
        numel = min(spec.numel, nbytes // DTYPE_BYTES[spec.dtype])
        if numel:
            chosen.append(replace(spec, tensors=(TensorSpec("zeros", (numel,)),)))
        nbytes -= numel * DTYPE_BYTES[spec.dtype]
    return chosen


def _report(best: int, seconds: dict[int, float]) -> str:
    tried = ", ".join(f"{_mib(size)} {1e3 * each:.2f} ms" for size, each in sorted(seconds.items()))
    return f"gradients travel in slices of at most {_mib(best)}; an exchange takes: {tried}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB"
