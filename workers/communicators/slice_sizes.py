"""The sizes of a hub's slices that workers try, and when they try them.

The law: workers try sizes only if one turn of all of them fits into `BUDGET`, as estimated from a pull of
one slice per shard; otherwise they keep the first size. Only sizes that split the buckets differently are
tried. `slice_tuning` measures, and the cost model predicts, by these same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, Slice, TensorSpec
from hubring.ps.job.sharding import SLICE_BYTES, number_of_slices, plan

SIZES = (SLICE_BYTES, 1 << 20, 2 << 20, 8 << 20)
"""Sizes to try, in bytes. The first is used if the size makes no difference."""
TURNS = 2
EXCHANGES = 3
"""Exchanges per turn. The first does not count, because it touches new memory."""
TRIAL_BYTES = 32 << 20
"""Bytes of the model that a trial uses at most."""
BUDGET = 2.0
"""Seconds for all turns together. If one turn takes longer, nothing is tried."""
SIZES_IN_MEMORY = (SLICE_BYTES, 8 << 20, 16 << 20, 24 << 20, 32 << 20, 64 << 20)
"""Sizes for shared memory, in bytes. A shard answers no other request while it steps one slice."""
OVERHEAD = 2 << 20
"""The cost of one slice's messages, as bytes that a shard sums and steps in the same time. Messages take half
a millisecond, in which one of 2 cores sums 2 MiB from 2 workers."""


def different(specs: Sequence[BucketSpec], sizes: Sequence[int]) -> list[int]:
    """Returns the sizes that split the buckets differently."""
    cuts: dict[int, int] = {}
    for size in sizes:
        cuts.setdefault(number_of_slices(specs, size), size)
    return list(cuts.values())


def probe(slices: Sequence[Slice]) -> tuple[list[Slice], float]:
    """Returns the largest slice of each shard, and their share of all elements."""
    largest = {piece.shard: piece for piece in sorted(slices, key=lambda piece: piece.numel)}
    chosen = list(largest.values())
    return chosen, sum(piece.numel for piece in chosen) / sum(piece.numel for piece in slices)


def turn_seconds(sizes: int, pull: float, part: float) -> float:
    """Returns the estimated seconds of a turn of all sizes.

    Args:
        sizes: Number of sizes.
        pull: Seconds of the slowest rank's pull of the `probe`.
        part: Share of the elements that the probe has.
    """
    return sizes * (1 + EXCHANGES) * max(pull, 1e-6) / part


def up_to(nbytes: int, specs: Sequence[BucketSpec]) -> list[BucketSpec]:
    """Returns the first `nbytes` of the buckets. The last bucket may be shortened."""
    chosen: list[BucketSpec] = []
    for spec in specs:
        numel = min(spec.numel, nbytes // DTYPE_BYTES[spec.dtype])
        if numel:
            chosen.append(replace(spec, tensors=(TensorSpec("zeros", (numel,)),)))
        nbytes -= numel * DTYPE_BYTES[spec.dtype]
    return chosen


def in_memory(specs: Sequence[BucketSpec], shards: int) -> int:
    """Returns the slice size, in bytes, with the least work for the busiest shard in shared memory.

    Large slices cost fewer messages, but can give one shard a slice more than the others. The last
    bucket counts twice: its exchange does not overlap with backward, so all shards should work on it.
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
