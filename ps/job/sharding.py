"""Splits buckets into slices, and distributes the slices over the shards by size.

Law: every element lies in exactly one slice. The slices depend only on the buckets and on `slice_bytes`.
Only the distribution depends on the number of shards. So a checkpoint restores onto any number of shards.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, ShardPlan, Slice, TensorSpec

SLICE_BYTES = 4 << 20
"""Small enough that the sum of one slice overlaps with the transfer of the next; large enough to amortize
Python's overhead per slice."""

PAGE_BYTES = 4096
"""Slices start at multiples of a page, so that a worker can map each slice separately."""

_MANY_PAGES = 16
_LINE_BYTES = 64
"""Slices of fewer pages start at multiples of a cache line, which is also the widest SIMD vector.

A fused optimizer uses different instructions for whole vectors and for the rest.
Slices that start between vectors therefore round bitwise as the whole tensor does.
"""

MAX_SLICES = 65_536
"""Maximum number of slices of a job; with SLICE_BYTES they have 256 GiB.

A slice costs its shard 0.1 ms and 9 kB. All slices must fit into the 4 MiB that gRPC lets a worker receive.
"""


def plan(
    buckets: Sequence[BucketSpec], shards: int, slice_bytes: int, loads: Sequence[int] = (), first: int = 0
) -> ShardPlan:
    """Splits every bucket and distributes the slices over `shards` shards. Deterministic.

    The loads of two shards differ by at most the largest slice (longest processing
    time first; Graham, 1969).

    Args:
        buckets: In the order of their keys.
        shards: At least 1.
        slice_bytes: The most bytes in one slice; at least one element.
        loads: The bytes that each shard holds already; empty for none.
        first: The key of the first slice.

    Raises:
        ConfigError: There is no shard, `slice_bytes` is too small, or a dtype is not supported.
    """
    if shards < 1:
        raise ConfigError(f"--shards {shards} is invalid; a hub needs --shards 1 or more")
    slices: list[Slice] = []
    for bucket in buckets:
        numel, step = bucket.numel, _step(bucket, slice_bytes)
        for offset in range(0, numel, step):
            slices.append(Slice(first + len(slices), bucket.index, offset, min(step, numel - offset), 0))
    return deal(slices, buckets, shards, loads)


def number_of_slices(buckets: Iterable[BucketSpec], slice_bytes: int) -> int:
    """Returns how many slices a plan has, without making it. Raises as `plan`."""
    return sum(-(-bucket.numel // _step(bucket, slice_bytes)) for bucket in buckets)


def deal(
    slices: Sequence[Slice], buckets: Sequence[BucketSpec], shards: int, loads: Sequence[int] = ()
) -> ShardPlan:
    """Distributes existing slices over `shards` shards, and ignores which shard held them before.

    The largest goes first, each to the least loaded shard; ties go to the lower key and shard. See `plan` for
    `loads`.
    """
    widths = {bucket.index: _element_bytes(bucket) for bucket in buckets}
    weights = [piece.numel * widths.get(piece.bucket, 1) for piece in slices]
    owners, heap = [0] * len(weights), [(load, shard) for shard, load in enumerate(loads or [0] * shards)]
    heapq.heapify(heap)
    for at in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):  # stable
        load, owners[at] = heap[0]
        heapq.heapreplace(heap, (load + weights[at], owners[at]))
    return ShardPlan(tuple(replace(piece, shard=owner) for piece, owner in zip(slices, owners, strict=True)))


def loads_of(held: ShardPlan, buckets: Sequence[BucketSpec], shards: int) -> list[int]:
    """Returns the bytes that each of `shards` shards holds of these buckets."""
    widths = {bucket.index: _element_bytes(bucket) for bucket in buckets}
    loads = [0] * shards
    for piece in held.slices:
        if piece.shard < shards:
            loads[piece.shard] += piece.numel * widths[piece.bucket]
    return loads


def _element_bytes(bucket: BucketSpec) -> int:
    if bucket.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"bucket {bucket.index} has the unsupported dtype {bucket.dtype!r};"
            f" use one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[bucket.dtype]


def _step(bucket: BucketSpec, slice_bytes: int) -> int:
    """Returns the elements of each slice but the last: nearly equal parts, so that none is a tiny rest."""
    numel, element_bytes = max(1, bucket.numel), _element_bytes(bucket)
    if slice_bytes < element_bytes:
        raise ConfigError(
            f"--slice-bytes {slice_bytes} is smaller than one element of {element_bytes} bytes;"
            f" use a larger value (default: {SLICE_BYTES})"
        )
    most = slice_bytes // element_bytes
    step = -(-numel // -(-numel // most))
    unit = (PAGE_BYTES if slice_bytes >= _MANY_PAGES * PAGE_BYTES else _LINE_BYTES) // element_bytes
    aligned = -(-step // unit) * unit
    if aligned > most:
        aligned = most // unit * unit or step  # a limit below one cache line cannot be aligned
    return aligned


class ParameterPart(NamedTuple):
    """The elements of one parameter in one slice.

    Attributes:
        position: The parameter's position in the bucket's `tensors`.
        in_slice: Its elements, counted from the slice's start.
        in_parameter: The same elements, counted from the start of the flat parameter.
    """

    position: int
    in_slice: slice
    in_parameter: slice


def parameter_parts(piece: Slice, tensors: Sequence[TensorSpec]) -> tuple[ParameterPart, ...]:
    """Returns the parts of a slice in order. Parameters without elements in the slice have none.

    Args:
        piece: A slice of the bucket.
        tensors: All parameters of the bucket.
    """
    first, last = piece.offset, piece.offset + piece.numel
    starts = accumulate((tensor.numel for tensor in tensors), initial=0)
    parts = []
    for position, (tensor, start) in enumerate(zip(tensors, starts, strict=False)):
        begin, end = max(first, start), min(last, start + tensor.numel)
        if begin < end:
            in_slice, in_parameter = slice(begin - first, end - first), slice(begin - start, end - start)
            parts.append(ParameterPart(position, in_slice, in_parameter))
    return tuple(parts)


_Item = TypeVar("_Item")


def runs_within(items: Iterable[_Item], most: int, size: Callable[[_Item], int]) -> list[list[_Item]]:
    """Returns the items in runs, in order, each of at most `most` bytes; a larger item has its own run."""
    runs: list[list[_Item]] = []
    room = 0
    for item in items:
        if not runs or size(item) > room:
            runs.append([])
            room = most
        runs[-1].append(item)
        room -= size(item)
    return runs
