"""Buckets that are handed over together.

Small buckets leave early, large exchanges cost less by the byte; which counts
for more only trying tells. So the buckets are small, and groups of them grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hubring.workers.buckets.bucketing import Bucket, join
from hubring.workers.buckets.layout import Kind, kind_of


class BucketGroup(NamedTuple):
    """Buckets of one kind, in their order, that wait for the last of them.

    Attributes:
        buckets: At least one.
        loads: What is given to the communicator: the buckets, or the one that joins them all.
    """

    buckets: tuple[Bucket, ...]
    loads: tuple[Bucket, ...]


def bucket_groups(buckets: Iterable[Bucket], nbytes: int, *, joined: bool) -> list[BucketGroup]:
    """Puts buckets into groups of at most `nbytes`, ordered by when their last is ready.

    Args:
        buckets: In the order of their indices, which is that of backward.
        nbytes: Where a group is full; a larger bucket goes alone.
        joined: Makes one exchange of a group; its buckets must lie side by side.
    """
    groups: list[list[Bucket]] = []
    newest: dict[Kind, list[Bucket]] = {}
    filled: Counter[Kind] = Counter()
    for bucket in buckets:
        kind, size = kind_of(bucket), bucket.gradients.nbytes
        if kind not in newest or filled[kind] + size > nbytes:
            newest[kind], filled[kind] = [], 0
            groups.append(newest[kind])
        newest[kind].append(bucket)
        filled[kind] += size
    groups.sort(key=lambda group: group[-1].spec.index)
    return [BucketGroup(tuple(group), _loads(group, joined)) for group in groups]


def _loads(group: Sequence[Bucket], joined: bool) -> tuple[Bucket, ...]:
    return (join(group),) if joined and len(group) > 1 else tuple(group)
