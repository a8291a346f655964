"""Measures how large a hub's slices should be, and chooses the number of shards.

Small slices pipeline: one is summed while another is in flight. Large slices need fewer
messages. Before the job's first values exist, all ranks push zeros in slices of every size,
over the connections and shards of the job. The trial measures the exchange of a mean, without
the optimizer's step, which needs values. In shared memory nothing is in flight, so the size is
computed, not measured. There, no slices go to shards beyond the number of cores: such shards
would only take turns with the others.

Invariant: all ranks make the same decisions. Each decision uses only data that is the same on
all ranks, or numbers that the ranks reduced together.
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
from hubring.ps.core.types import BucketSpec, Slice, Slicing
from hubring.ps.core.work import Work
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.slice_sizes import (
    BUDGET,
    EXCHANGES,
    SIZES,
    TRIAL_BYTES,
    TURNS,
    different,
    in_memory,
    probe,
    turn_seconds,
    up_to,
)

log = logging.getLogger(__name__)


class SliceTrial:
    """One trial of all ranks together. They must have the same buckets.

    Args:
        communicator: Runs collectives and allocates memory to send from.
        session: Gets trial plans from the server.
        client: Connections to the shards.
        specs: The model's buckets, uncompressed.
        wired: Whether this rank reaches some shard over the network, not through shared memory.
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
        # Without an optimizer the hub only averages and needs no first values.
        self._specs = [replace(spec, optimizer="") for spec in up_to(TRIAL_BYTES, specs)]
        self._whole = specs
        self._number = 0
        self._over = False
        """Whether the others have ended this trial: this worker is in the place of one that was lost."""
        self._zeros: dict[int, torch.Tensor] = {}
        """By bucket index: the gradients to push and the target of the mean."""

    def best(self) -> Slicing:
        """Returns the size with the shortest exchange on the slowest rank, on all shards.

        If all ranks reach all shards through shared memory, returns the size with the least work for the
        busiest shard, on no more shards than the machine has cores.

        Raises:
            HubringError: An exchange failed.
        """
        if self._agree([float(self._wired)]) == [0.0]:
            known = len(self._session.shards)
            # All cores of the machine: this rank and the shards may be limited to different cores.
            shards = min(known, os.cpu_count() or known)
            size = in_memory(self._whole, shards)
            where = f", on {shards} of {known} shards ({shards} CPU cores)" if shards < known else ""
            self._log(f"gradients are in shared memory, in slices of at most {_mib(size)}{where}")
            return Slicing(size, shards)
        sizes = different(self._specs, SIZES)
        if len(sizes) == 1:
            return Slicing(sizes[0])
        allocate = self._communicator.allocate
        self._zeros = {spec.index: allocate(spec.numel, getattr(torch, spec.dtype)) for spec in self._specs}
        turns = min(TURNS, int(BUDGET / self._seconds_a_turn(sizes)))
        if not turns:
            self._log(
                f"gradients are sent in slices of at most {_mib(sizes[0])}; trying other sizes takes too long"
            )
            return Slicing(sizes[0])
        taken: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(turns):
            for size in sizes:
                taken[size] += self._turn(size)
        seconds = self._agree([median(taken[size]) for size in sizes])
        medians = dict(zip(sizes, seconds, strict=True))
        best = fastest(medians)
        self._log(_report(best, medians))
        return Slicing(best)

    def _seconds_a_turn(self, sizes: Sequence[int]) -> float:
        """Estimates the seconds of a turn of all sizes, from the slowest rank's pull of a slice per shard."""
        largest, part = probe(self._planned(sizes[0]))
        self._pull(largest)  # touches new memory
        self._barrier()
        (seconds,) = self._agree([self._pull(largest)])
        return turn_seconds(len(sizes), seconds, part)

    def _turn(self, size: int) -> list[float]:
        """Returns the seconds of each exchange that counts, in slices of `size`."""
        slices = self._planned(size)
        self._pull(slices)  # the answers have the clocks for the pushes
        return [self._exchange(slices, number) for number in range(EXCHANGES)][1:]

    def _planned(self, size: int) -> Sequence[Slice]:
        """Gives the shards a trial plan and returns its slices."""
        self._barrier()  # no rank uses the last plan any more
        self._number += 1
        assigned = self._session.plan(self._specs, Slicing(size), trial=self._number)
        self._over = assigned.step > 0
        self._barrier()  # all ranks have the new plan
        return assigned.plan.slices

    def _pull(self, slices: Sequence[Slice], *, push: bool = False) -> float:
        """Returns the seconds in which answers to all slices arrive, after a push of zeros or without."""
        if self._over:
            return 0.0
        began = time.monotonic()
        work = Work(f"{'an exchange' if push else 'a pull'} of zeros", len(slices), self._client.attend)
        with self._client.batched():
            for piece in slices:
                part = self._zeros[piece.bucket][piece.offset : piece.offset + piece.numel]
                if push:
                    prepared = self._client.prepare(piece.key, part, part)
                    self._client.push_pull(piece.shard, prepared, {}, work)
                else:
                    self._client.pull(piece.shard, piece.key, part, work)
        work.wait(self._communicator.timeout)
        return time.monotonic() - began

    def _exchange(self, slices: Sequence[Slice], number: int) -> float:
        self._barrier()
        # What a lost worker has pushed, one in its place does not push again.
        missing = [one for one in slices if not self._over and self._client.clock(one.key) <= number]
        return self._pull(missing, push=True)

    def _barrier(self) -> None:
        self._communicator.collective(Call(Collective.BARRIER, "slices.barrier")).wait()

    def _agree(self, seconds: list[float]) -> list[float]:
        own = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        call = Call(Collective.ALLREDUCE, "slices", ReduceOp.MAX)
        return [float(each) for each in self._communicator.collective(call, own).get()]

    def _log(self, text: str) -> None:
        if self._communicator.rank == 0:
            log.info("%s", text)


def _report(best: int, seconds: dict[int, float]) -> str:
    tried = ", ".join(f"{_mib(size)} {1e3 * each:.2f} ms" for size, each in sorted(seconds.items()))
    return f"gradients are sent in slices of at most {_mib(best)}; time per exchange: {tried}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB"
