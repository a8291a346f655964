"""How a model is cut into buckets and slices and dealt to servers, and what of an exchange backward hides.

Buckets are filled in the order of backward (`hubring.workers.buckets.bucketing`), slices never span buckets,
and shards get slices by size (`hubring.ps.job.sharding`). So a model that fits into one bucket and one slice
keeps a second server idle. Where the shapes of the parameters are unknown, every bucket is taken to be full.

A group of buckets leaves once backward has reached its last parameter. Its exchange follows those of earlier
groups. So the last group leaves when backward ends, and nothing hides it. Workers try sizes of groups
(`hubring.workers.reducer.tuning`) and keep the first unless another makes the whole step clearly shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from math import ceil

import numpy as np
from msgspec import Struct

from hubring.ps.core.timing import fastest
from hubring.ps.core.types import BucketSpec, ShardPlan, TensorSpec
from hubring.ps.job.sharding import plan, runs_within
from hubring.workers.communicators import slice_sizes

BUCKET_BYTES = 4 << 20
"""Most bytes of a bucket on a CPU (`hubring.workers.optimizer.setup`). A larger parameter has its own."""
WIDTH = 4
"""Bytes of an element: float32."""


class Cut(Struct, frozen=True):
    """The part of a model on the busiest server.

    Attributes:
        part: Share of the model's bytes, 0 to 1.
        slices: Its bytes divided by those of its largest slice, at least 1.
        count: Number of its slices.
    """

    part: float
    slices: float
    count: int


def cut(nbytes: int, servers: int, slice_bytes: int, tensors: tuple[int, ...] = ()) -> Cut:
    """Returns the busiest server's part.

    Args:
        nbytes: Bytes of the model.
        servers: Number of servers.
        slice_bytes: Most bytes of a slice.
        tensors: Bytes of each parameter in the order of registration; empty: unknown.
    """
    if tensors:
        return _dealt(planned(nbytes, servers, slice_bytes, tensors))
    return _even(nbytes, servers, slice_bytes)


@lru_cache(maxsize=512)
def planned(nbytes: int, servers: int, slice_bytes: int, tensors: tuple[int, ...]) -> ShardPlan:
    """Returns the plan that shards use."""
    return plan(buckets(nbytes, tensors), servers, slice_bytes)


@lru_cache(maxsize=64)
def buckets(nbytes: int, tensors: tuple[int, ...] = ()) -> tuple[BucketSpec, ...]:
    """Returns the model's buckets in the order of backward. See `cut` for the arguments."""
    return tuple(
        BucketSpec(index, "float32", "", (TensorSpec("parameters", (max(1, size // WIDTH),)),))
        for index, size in enumerate(bucket_sizes(nbytes, tensors))
    )


def bucket_sizes(nbytes: int, tensors: tuple[int, ...] = (), most: int = BUCKET_BYTES) -> list[int]:
    """Returns the bytes of each bucket in the order of backward.

    Args:
        nbytes: Bytes of the model.
        tensors: As in `cut`.
        most: Most bytes of a bucket with several parameters.
    """
    if not tensors:
        full, rest = divmod(nbytes, most)
        return [most] * full + [rest] * bool(rest)
    return filled(tensors[::-1], most)


def filled(sizes: tuple[int, ...] | list[int], most: int) -> list[int]:
    """Returns the bytes of runs of at most `most`; a larger one is a run of its own."""
    return [sum(run) for run in runs_within(sizes, most, int)]


def trial(nbytes: int, tensors: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
    """Returns the bytes of the workers' slice trial, and the sizes that it tries, the first by default."""
    specs, sizes = _trial(nbytes, tensors)
    return sum(spec.numel for spec in specs) * WIDTH, sizes


@lru_cache(maxsize=64)
def _trial(nbytes: int, tensors: tuple[int, ...]) -> tuple[tuple[BucketSpec, ...], tuple[int, ...]]:
    specs = slice_sizes.up_to(slice_sizes.TRIAL_BYTES, buckets(nbytes, tensors))
    return tuple(specs), tuple(slice_sizes.different(specs, slice_sizes.SIZES))


def probe(nbytes: int, servers: int, tensors: tuple[int, ...] = ()) -> tuple[list[int], float]:
    """Returns the bytes of the largest slice of each server in the trial, and their share of the trial."""
    specs, sizes = _trial(nbytes, tensors)
    pieces, part = slice_sizes.probe(plan(specs, servers, sizes[0]).slices)
    return [piece.numel * WIDTH for piece in pieces], part


def in_memory(nbytes: int, servers: int, tensors: tuple[int, ...] = ()) -> int:
    """Returns the bytes of a slice in shared memory."""
    # The rule looks at every slice; beyond this size they are so many that servers share them evenly.
    known = buckets(min(nbytes, slice_sizes.TRIAL_BYTES * servers) if not tensors else nbytes, tensors)
    return slice_sizes.in_memory(known, servers)


def _dealt(found: ShardPlan) -> Cut:
    loads: dict[int, list[int]] = {}
    for piece in found.slices:
        loads.setdefault(piece.shard, []).append(piece.numel)
    busiest, total = max(loads.values(), key=sum), sum(map(sum, loads.values()))
    return Cut(sum(busiest) / total, sum(busiest) / max(busiest), len(busiest))


def _even(nbytes: int, servers: int, slice_bytes: int) -> Cut:
    """Returns what `_dealt` would for buckets that are full, without a plan of every slice."""
    full, rest = divmod(nbytes, BUCKET_BYTES)
    each = ceil(BUCKET_BYTES / slice_bytes)
    number, size = full * each, BUCKET_BYTES / each
    last = ceil(rest / slice_bytes)
    last_size = rest / last if last else 0.0
    rounds, over = divmod(number, servers)
    # Each of the rest's slices goes to the server with the least; no more servers than slices can get any.
    most = max(1, last)
    loads = [(rounds * size, rounds)] * min(servers - over, most)
    loads += [((rounds + 1) * size, rounds + 1)] * min(over, most)
    for _ in range(last):
        least, slices = heappop(loads)
        heappush(loads, (least + last_size, slices + 1))
    load, count = max(loads)
    return Cut(load / nbytes, load / (size if rounds or over else last_size), count)


GROUP_BYTES = (25 << 20, 4 << 20, 10 << 20, 64 << 20)
"""Sizes of groups that workers try (`hubring.workers.reducer.tuning`)."""


def hidden(busy: float, backward: float, rest: float, nbytes: int, tensors: tuple[int, ...] = ()) -> float:
    """Returns the seconds of an exchange that backward hides, with the groups that workers choose.

    Args:
        busy: Seconds that the busiest link or processor works for the exchange.
        backward: Seconds of backward that exchanges can overlap with.
        rest: The other seconds of the step: forward, and what of the exchange never overlaps.
        nbytes: Bytes of the model.
        tensors: Bytes of its parameters in the order of registration; empty: unknown.
    """
    if not (busy > 0 and backward > 0):
        return 0.0
    found = {size: shown(busy, backward, _groups(nbytes, tensors, size)) for size in GROUP_BYTES}
    chosen = fastest({size: rest + backward + seconds for size, seconds in found.items()})
    return busy - found[chosen]


@lru_cache(maxsize=256)
def _groups(nbytes: int, tensors: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(filled(bucket_sizes(nbytes, tensors), most))


def shown(busy: float, backward: float, groups: Sequence[int]) -> float:
    """Returns the seconds that an exchange lasts beyond backward.

    Args:
        busy: Seconds of the whole exchange.
        backward: Seconds of backward; gradients are ready in proportion to their bytes.
        groups: Bytes of each group in the order of backward, at least one.
    """
    sizes = np.array(groups, float)
    left = sizes[::-1].cumsum()[::-1]
    # The exchange ends when it would if it had no pause from some group on.
    return float((busy * left - backward * (left - sizes)).max() / left[0])


_PLAIN, _COMMON, _UNIT = 9_930, 4_810, 523
"""Parameters without a hidden layer, with one but without its units, and of each unit
(`hubring.workers.examples.digits.network`)."""


def tensors(job: str | None, model_bytes: int) -> tuple[int, ...]:
    """Returns the bytes of each parameter in the order of registration; empty: unknown.

    Args:
        job: Name of the job; None: a script.
        model_bytes: Bytes that a worker sends; within 1 % of those of the model.
    """
    if job != "digits":
        return ()
    units = max(1, round((model_bytes / WIDTH - _COMMON) / _UNIT))
    total = min((_PLAIN, _COMMON + _UNIT * units), key=lambda numel: abs(WIDTH * numel - model_bytes))
    if abs(WIDTH * total / model_bytes - 1) > 0.01:
        return ()
    convolutions = (16 * 9, 16, 32 * 16 * 9, 32)
    layers = (512 * 10, 10) if total == _PLAIN else (512 * units, units, 10 * units, 10)
    return tuple(WIDTH * numel for numel in (*convolutions, *layers))
