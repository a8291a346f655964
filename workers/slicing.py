"""Finds out by trying how large a hub's slices should be.

Small ones pipeline: while one is summed, another is on its way. Large ones cost
fewer messages. Before the job's first values exist, all ranks push zeros in
slices of every size, through the wires and the shards that they will use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from ps.client import KVClient
from ps.messages import Collective, ReduceOp
from ps.session import Session
from ps.sharding import SLICE_BYTES, plan
from ps.types import Slice
from ps.work import Work
from workers.bucketing import Bucket
from workers.communicator import Communicator
from workers.tuning import choose

log = logging.getLogger(__name__)

SIZES = (SLICE_BYTES, 1 << 20, 2 << 20, 8 << 20)
"""Bytes to try; the first is taken where it makes no difference."""
TURNS = 2
EXCHANGES = 4
"""Exchanges of a turn; the first, which touches new memory, does not count."""
TRIAL_BYTES = 64 << 20
"""So much of a large model tells enough, and takes well under a second a turn."""


class SliceTrial:
    """One trial of all ranks together; they must hold the same buckets.

    Args:
        communicator: For what ranks say to each other.
        session: Where trial plans come from.
        client: Lines to the shards.
        buckets: Of the model; their gradients, zeros still, are what is pushed and where it lands.
    """

    def __init__(
        self, communicator: Communicator, session: Session, client: KVClient, buckets: Sequence[Bucket]
    ) -> None:
        self._communicator = communicator
        self._session = session
        self._client = client
        self._buckets = _up_to(TRIAL_BYTES, buckets)
        # Averaged alone: what has no optimizer needs no first values.
        self._specs = [replace(bucket.spec, optimizer="") for bucket in self._buckets]

    def best(self) -> int:
        """The size with which the slowest rank's exchange was the shortest, in bytes.

        Raises:
            HubringError: What an exchange failed with.
        """
        sizes = self._different()
        if len(sizes) == 1:
            return sizes[0]
        taken: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(TURNS):
            for size in sizes:
                taken[size] += self._turn(size)
        seconds = self._agree([median(taken[size]) for size in sizes])
        self._client.traffic.clear()  # all of it was the trial's
        best = choose(dict(zip(sizes, seconds, strict=True)))
        if self._communicator.rank == 0:
            log.info("%s", _report(best, dict(zip(sizes, seconds, strict=True))))
        return best

    def _different(self) -> list[int]:
        """Sizes that cut the buckets differently."""
        cuts: dict[int, int] = {}
        for size in SIZES:
            cuts.setdefault(len(plan(self._specs, 1, size).slices), size)
        return list(cuts.values())

    def _turn(self, size: int) -> list[float]:
        """Seconds of each exchange that counts, in slices of `size`."""
        self._barrier()  # nobody uses the last plan any more
        slices = self._session.plan(self._specs, size, trial=True).plan.slices
        self._barrier()  # nobody is asking for this one still
        clocks = Work("learning the clocks of a trial", len(slices))
        for piece in slices:
            self._client.pull(piece.shard, piece.key, self._part(piece), clocks)
        clocks.wait(self._communicator.timeout)
        return [self._exchange(slices) for _ in range(EXCHANGES)][1:]

    def _exchange(self, slices: Sequence[Slice]) -> float:
        self._barrier()
        began = time.monotonic()
        work = Work("an exchange of zeros", len(slices))
        for piece in slices:
            part = self._part(piece)
            self._client.push_pull(piece.shard, piece.key, part, part, {}, work)
        work.wait(self._communicator.timeout)
        return time.monotonic() - began

    def _part(self, piece: Slice) -> torch.Tensor:
        return self._buckets[piece.bucket].host_gradients[piece.offset : piece.offset + piece.numel]

    def _barrier(self) -> None:
        self._communicator.collective(Collective.BARRIER, None, name="slices.barrier").wait(
            self._communicator.timeout
        )

    def _agree(self, seconds: list[float]) -> list[float]:
        own = torch.tensor(seconds, dtype=torch.float64)
        work = self._communicator.collective(Collective.ALLREDUCE, own, name="slices", op=ReduceOp.MAX)
        work.wait(self._communicator.timeout)
        assert work.result is not None
        return [float(each) for each in work.result]


def _up_to(nbytes: int, buckets: Sequence[Bucket]) -> list[Bucket]:
    """The first buckets, up to `nbytes` of them and at least one."""
    chosen: list[Bucket] = []
    for bucket in buckets:
        nbytes -= bucket.gradients.nbytes
        if nbytes < 0 and chosen:
            break
        chosen.append(bucket)
    return chosen


def _report(best: int, seconds: dict[int, float]) -> str:
    tried = ", ".join(f"{_mib(size)} {1e3 * each:.2f} ms" for size, each in sorted(seconds.items()))
    return f"gradients travel in slices of at most {_mib(best)}; an exchange takes: {tried}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB"
