"""Which shard holds what: buckets are cut into slices, slices dealt out by weight.

Law: every element lies in exactly one slice. The cuts depend on the buckets and
on `slice_bytes` alone, so a checkpoint taken on some number of shards restores
onto any other; only the dealing knows how many shards there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, ShardPlan, Slice

SLICE_BYTES = 4 << 20
"""Small enough that summing one slice overlaps with the next one's journey, big enough to pay for Python."""

PAGE_BYTES = 4096
"""Slices start at multiples of a page, so that each can be mapped by itself into a worker's memory."""

_MANY_PAGES = 16
_LINE_BYTES = 64
"""Slices of fewer pages start at multiples of a cache line, which is also the widest SIMD vector.

A fused optimizer treats whole vectors and the rest with other instructions, so
slices cut between vectors round as the uncut tensor would: bitwise.
"""


def plan(buckets: Sequence[BucketSpec], shards: int, slice_bytes: int = SLICE_BYTES) -> ShardPlan:
    """Cuts every bucket and deals the slices out to `shards` shards, alike on every call.

    No two shards' loads differ by more than the largest slice (longest processing
    time first; Graham, 1969).

    Args:
        buckets: In the order of their keys.
        shards: At least 1.
        slice_bytes: The most bytes in one slice; at least one element.

    Raises:
        ConfigError: No shard to hold anything, slices too small, or a dtype that does not travel.
    """
    if shards < 1:
        raise ConfigError(f"{shards} shards cannot hold a model: give --shards 1 or more")
    cut = [
        (bucket.index, offset, numel)
        for bucket in buckets
        for offset, numel in _cuts(bucket.numel, _element_bytes(bucket), slice_bytes)
    ]
    return deal([Slice(key, *place, shard=0) for key, place in enumerate(cut)], buckets, shards)


def deal(slices: Sequence[Slice], buckets: Sequence[BucketSpec], shards: int) -> ShardPlan:
    """Deals slices that are cut already out to `shards` shards, whoever held them before."""
    widths = {bucket.index: _element_bytes(bucket) for bucket in buckets}
    owners = _deal([piece.numel * widths.get(piece.bucket, 1) for piece in slices], shards)
    return ShardPlan(tuple(replace(piece, shard=owner) for piece, owner in zip(slices, owners, strict=True)))


def _element_bytes(bucket: BucketSpec) -> int:
    if bucket.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"bucket {bucket.index} has dtype {bucket.dtype!r}, which does not travel;"
            f" use one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[bucket.dtype]


def _cuts(numel: int, element_bytes: int, slice_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of near-equal parts, so that no tiny rest costs a journey of its own."""
    if slice_bytes < element_bytes:
        raise ConfigError(
            f"--slice-bytes {slice_bytes} is less than one element of {element_bytes} bytes;"
            f" the default is {SLICE_BYTES}"
        )
    if numel == 0:
        return
    most = slice_bytes // element_bytes
    step = ceil(numel / ceil(numel / most))
    unit = (PAGE_BYTES if slice_bytes >= _MANY_PAGES * PAGE_BYTES else _LINE_BYTES) // element_bytes
    aligned = ceil(step / unit) * unit
    if aligned > most:
        aligned = most // unit * unit or step  # a limit under one line leaves nothing to align
    for offset in range(0, numel, aligned):
        yield offset, min(aligned, numel - offset)


def _deal(weights: Sequence[int], shards: int) -> list[int]:
    """The heaviest first, each to the lightest shard so far; ties go to the lower key and shard."""
    owners = [0] * len(weights)
    loads = [(0, shard) for shard in range(shards)]
    for key in sorted(range(len(weights)), key=lambda key: (-weights[key], key)):
        load, owners[key] = loads[0]
        heapq.heapreplace(loads, (load + weights[key], owners[key]))
    return owners
